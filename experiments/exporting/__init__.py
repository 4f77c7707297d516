"""Models in the formats of others: transformers, semi-structured tensors."""
