"""Rollouts: playing episodes."""
