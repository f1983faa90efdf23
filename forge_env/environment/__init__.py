"""The contract that an environment keeps, and the base classes that keep it for authors."""

from forge_env.environment.base import API_VERSION, Environment, EnvironmentConfig

__all__ = ["API_VERSION", "Environment", "EnvironmentConfig"]
