"""Recipes: models, loading, overrides, printing."""

from forge_env.config.loader import bundled_recipes, load_config
from forge_env.config.recipe import RunConfig

__all__ = ["RunConfig", "bundled_recipes", "load_config"]
