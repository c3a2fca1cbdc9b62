"""What a training takes on each rank, in every way to spread it: memory, messages and time."""
