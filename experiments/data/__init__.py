"""Text data: sources, tokenizers, token files, and batches for the trainer."""
