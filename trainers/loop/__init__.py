"""What goes on around an algorithm: actors, checks, checkpoints, held-out scores, status, the supervised warm-up."""
