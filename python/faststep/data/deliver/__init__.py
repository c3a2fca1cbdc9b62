"""The way of a batch to the script: memory for it, copies to a device, transforms."""
