"""Image data sets: reading, augmentation, and batches for the trainer."""
