"""Supervised fine-tuning: models learn conversations."""
