"""The environment contract, and base classes that implement it for authors."""

from forge_env.environment.base import API_VERSION, Environment, EnvironmentConfig

__all__ = ["API_VERSION", "Environment", "EnvironmentConfig"]
