"""Writes models in the formats of other libraries: transformers, and torch's semi-structured
tensors."""
