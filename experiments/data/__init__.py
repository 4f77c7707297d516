"""Text: where it comes from, how it becomes tokens, and the batches that are cut from them."""
