"""Updates of slices, and the parameters that ranks gather."""
