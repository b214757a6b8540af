"""How a packed checkpoint runs: model, KV4 pages, scheduler, engine, server, bench."""
