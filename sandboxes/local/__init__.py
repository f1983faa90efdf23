"""The embedded engine: Linux namespaces without a daemon."""

from sandboxes.local.engine import LocalEngine

__all__ = ["LocalEngine"]
