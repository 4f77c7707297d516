"""What a training will need, said before it is begun and without a GPU."""
