"""Sandboxes in E2B's cloud."""

from sandboxes.e2b.engine import E2BEngine

__all__ = ["E2BEngine"]
