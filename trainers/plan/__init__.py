"""Forecast of a recipe's GPUs, memory and time before it runs (docs/plan.md). No module here imports torch."""
