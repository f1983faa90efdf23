"""A run rehearsed without its GPUs: the real loops and buffer on a simulated clock (docs/rehearsal.md)."""
