"""Packed checkpoints inside other people's runtimes: one module per runtime, each imported for its own sake."""
