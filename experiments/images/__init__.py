"""Image data sets: reading them, augmenting them, and batches of them."""
