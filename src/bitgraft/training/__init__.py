"""One loop for every method, its configuration, checkpoints and progress."""
