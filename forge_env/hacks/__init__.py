"""Detection of reward hacking in recorded episodes."""
