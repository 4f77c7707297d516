"""Text data: its sources, their tokens, and the batches that are cut from these."""
