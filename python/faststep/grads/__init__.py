"""What happens to gradients before the step: they are divided, measured and added."""
