"""What a recipe will take before it runs: GPUs, memory, time (docs/plan.md). Nothing here imports torch."""
