"""The Docker engine: hardened containers, each with a persistent runner inside."""

from sandboxes.docker.engine import DockerEngine

__all__ = ["DockerEngine"]
