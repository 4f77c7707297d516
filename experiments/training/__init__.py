"""The training loop and its parts: optimizer steps, ranks, sharding, checkpoints and logs."""
