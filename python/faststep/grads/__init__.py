"""What happens to gradients between backward and the step: divided, measured, clipped, added."""
