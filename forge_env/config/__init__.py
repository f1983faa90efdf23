"""What can be configured (recipes, evaluations), and the one reader of it all."""

from forge_env.config.finding import bundled_recipes, load_config
from forge_env.config.recipe import RunConfig

__all__ = ["RunConfig", "bundled_recipes", "load_config"]
