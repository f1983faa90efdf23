"""Registration with gymnasium: `gymnasium.make("forge_env/NAME")` works once both packages are imported.

The order of the imports doesn't matter. Gymnasium has no plug-in mechanism (an environment exists once the module that
registers it was imported), and `import forge_env` must not import gymnasium. If gymnasium is imported later, an import
hook registers the names at that moment and then removes itself.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


def register_with_gymnasium() -> None:
    """Register every environment with gymnasium: now if it is imported, otherwise on its import."""
    if hasattr(sys.modules.get("gymnasium"), "make_vec"):
        _register()
    elif not any(isinstance(finder, _WhenImported) for finder in sys.meta_path):
        sys.meta_path.insert(0, _WhenImported())


def _register() -> None:
    import_module("forge_env.gym")  # importing it registers them


class _WhenImported(MetaPathFinder):
    """Import hook that finds gymnasium as usual, and calls `_register` after its import."""

    def __init__(self) -> None:
        self._searching = False

    def find_spec(self, fullname: str, path: object, target: object = None) -> ModuleSpec | None:
        if fullname != "gymnasium" or self._searching:
            return None
        self._searching = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._searching = False
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            _register()

        setattr(spec.loader, "exec_module", exec_module)  # noqa: B010 - set on this loader, not on its class
        return spec
