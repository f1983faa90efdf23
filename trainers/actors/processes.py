"""Processes for actors, on this machine."""

from __future__ import annotations

import atexit
import gc
import os
from collections.abc import Mapping
from functools import partial

from monarch.actor import ProcMesh, this_host


def _set_environment(variables: Mapping[str, str]) -> None:
    os.environ.update(variables)


async def start_processes(count: int, name: str, environment: Mapping[str, str] | None = None) -> ProcMesh:
    """`count` processes that end with this one; stop them with `stop()`."""
    mesh: ProcMesh = this_host().spawn_procs(
        per_host={"procs": count}, bootstrap=partial(_set_environment, dict(environment or {})), name=name
    )
    await mesh.initialized
    return mesh


def settle_heap() -> None:
    """Let the garbage collector pass over all that is loaded by now, and look less often.

    Libraries leave a million objects that live as long as the process; walking them took a fifth of the generator's
    time.
    """
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)  # at the end of the process some libraries complain of what is still there
    gc.set_threshold(50_000, 20, 50)
