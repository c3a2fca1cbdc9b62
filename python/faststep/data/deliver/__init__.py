"""What happens to a batch on its way to the script: memory, copies to a device, transforms."""
