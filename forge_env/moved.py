"""Deprecated module names: previously documented names still import, with a warning that gives the new name."""

from __future__ import annotations

import sys
import warnings
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from types import ModuleType

MOVED = {
    "forge_env.curriculum": "forge_env.tasks.curriculum",
    "forge_env.datasets": "forge_env.tasks.datasets",
    "forge_env.interop": "forge_env.serve",
    "forge_env.interop.openenv": "environments.openenv",
    "forge_env.interop.openenv_server": "forge_env.serve.openenv",
    "forge_env.interop.verifiers_env": "environments.verifiers",
    "forge_env.mcp_tools": "forge_env.tools.mcp",
    "forge_env.mixture": "environments.mixture",
    "forge_env.policies": "forge_env.rollout",
    "forge_env.policies.endpoint": "forge_env.endpoint.policy",
    "forge_env.policies.scripted": "forge_env.rollout.scripted",
    "forge_env.rubric": "forge_env.rewards.rubric",
    "forge_env.sampling": "forge_env.tasks.order",
    "forge_env.sandbox.attacks": "forge_env.sandbox_audit.attacks",
    "forge_env.sandbox.conformance": "forge_env.sandbox_audit.conformance",
    "forge_env.sandbox_environment": "forge_env.environment.sandbox_environment",
    "forge_env.single_turn": "forge_env.environment.single_turn",
    "forge_env.tool_environment": "forge_env.environment.tool_environment",
}


class _Moved(MetaPathFinder, Loader):
    def find_spec(self, fullname: str, path: object, target: object = None) -> ModuleSpec | None:
        return spec_from_loader(fullname, self) if fullname in MOVED else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        new = MOVED[spec.name]
        warnings.warn(f"{spec.name} is now {new}", DeprecationWarning, stacklevel=2)
        module = import_module(new)
        self._own_spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._own_spec  # the import system has just replaced it


def keep_old_names() -> None:
    """Install the import hook for the old names in `MOVED`, once."""
    if not any(isinstance(finder, _Moved) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Moved())  # before the finder that would load a moved file twice
