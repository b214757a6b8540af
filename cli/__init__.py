"""How a person asks for it: one file per command."""
