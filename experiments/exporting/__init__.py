"""Export of models to the formats of transformers and of torch's semi-structured tensors."""
