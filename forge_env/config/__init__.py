"""Configuration models of recipes and evaluations, and the reader for all of them."""

from forge_env.config.finding import bundled_recipes, load_config
from forge_env.config.recipe import RunConfig

__all__ = ["RunConfig", "bundled_recipes", "load_config"]
