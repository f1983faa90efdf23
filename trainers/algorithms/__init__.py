"""Training algorithms, one per file, each readable from top to bottom. `trainers.loop` runs them."""
