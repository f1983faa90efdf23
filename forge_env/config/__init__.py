"""Recipes: models, loading, overrides."""

from forge_env.config.models import RunConfig

__all__ = ["RunConfig"]
