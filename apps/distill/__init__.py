"""On-policy distillation: a small model learns from a large one on its own samples."""
