"""Recipes that run: YAML and launch files, no logic."""
