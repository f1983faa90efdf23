"""Weights on their way from the trainer to the generators."""
