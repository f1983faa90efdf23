"""The training system around an algorithm: actors, checks, checkpoints, held-out evaluation, status, warm-up."""
