"""Gradients before the step: they are divided, measured and added."""
