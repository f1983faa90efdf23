"""Tools: methods that an agent may call, and ready-made ones for environments with a sandbox.

    class Tally(fe.SandboxEnvironment):
        bash = fe.tools.bash()
        editor = fe.tools.files()

The ready-made tools are imported on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__all__ = ["bash", "files", "python", "submit"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("forge_env.environment.ready_made"), name)


if TYPE_CHECKING:
    from forge_env.environment.ready_made import bash as bash
    from forge_env.environment.ready_made import files as files
    from forge_env.environment.ready_made import python as python
    from forge_env.environment.ready_made import submit as submit
