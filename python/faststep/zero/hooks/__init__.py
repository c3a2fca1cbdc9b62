"""Gradients on their way from backward to slices, and as scripts read them there."""
