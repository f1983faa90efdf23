"""Checks of environments without a model, as run by `forge-env validate`."""
