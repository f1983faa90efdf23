"""The loops: supervised warm-up and asynchronous GRPO."""
