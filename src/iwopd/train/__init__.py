"""Training: the loop, the update, checkpoints, tracking, run directories."""
