"""Replays of recorded runs: what was sampled and trained on, computed again and compared."""
