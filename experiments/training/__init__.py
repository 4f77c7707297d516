"""The training loop, and what a run needs around it: optimizer steps, ranks, log."""
