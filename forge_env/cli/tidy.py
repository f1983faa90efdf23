"""Removing what killed processes left: `train` does it before it starts, other commands when they are done.

It runs in the main thread: imports in a second thread beside a command's own can see half-initialized modules.
"""

from __future__ import annotations


def tidy() -> None:
    """Remove temporary files and sandboxes whose owners are dead."""
    from forge_env.run.scratch import reap_scratch
    from forge_env.sandbox import reap_abandoned

    reap_scratch()
    reap_abandoned()
