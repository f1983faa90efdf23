"""GRPO on word problems."""
