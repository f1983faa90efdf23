"""Disturbed training runs: real `forge-env train` processes that die or lose what they need, and their recovery."""
