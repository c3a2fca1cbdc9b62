"""The position in an epoch: saved, restored, and shown to torch's iterators."""
