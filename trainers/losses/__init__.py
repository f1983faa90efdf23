"""Policy-gradient losses, one small class each, and what they are made of."""
