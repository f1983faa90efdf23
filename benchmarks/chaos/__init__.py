"""Disturbed training runs: real `forge-env train` processes that die or lose resources, and their recovery."""
