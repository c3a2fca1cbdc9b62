"""Stage 3: torch's fully_shard."""
