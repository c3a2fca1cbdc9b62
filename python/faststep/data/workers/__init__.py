"""Loading with any dataset: worker processes and threads, and datasets that they share."""
