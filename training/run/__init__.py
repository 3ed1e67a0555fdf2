"""A training run: everything it is made of, its loop, its checkpoints and its logs."""
