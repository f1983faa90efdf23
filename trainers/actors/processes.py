"""Processes for actors, on this machine."""

from __future__ import annotations

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
