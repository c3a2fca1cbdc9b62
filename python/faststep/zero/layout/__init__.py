"""Where parameters and slices lie: buckets, cuts, memory."""
