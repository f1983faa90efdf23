"""The embedded engine: the kernel's own namespaces, no daemon."""

from sandboxes.local.engine import LocalEngine

__all__ = ["LocalEngine"]
