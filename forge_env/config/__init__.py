"""What can be configured (recipes, evaluations), and the one reader of it all."""

from forge_env.config.recipe import RunConfig, bundled_recipes, load_config

__all__ = ["RunConfig", "bundled_recipes", "load_config"]
