"""State dicts and checkpoints."""
