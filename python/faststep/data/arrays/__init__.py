"""Datasets whose samples are rows of arrays, and the iterator that gathers them in C threads."""
