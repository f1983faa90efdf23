"""Checkpoints, tokenizers and chat rendering."""
