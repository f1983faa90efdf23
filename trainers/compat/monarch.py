"""Monarch: its reaction to the death of processes.

`trainers.actors.sockets` redirects two libc calls of its library, and was checked with the same versions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trainers.compat import Package

PACKAGE = Package("torchmonarch", ("0.7.0",))


def on_unhandled_fault(react: Callable[[Any], None]) -> None:
    """Call `react(failure)` for every death that no actor handles; by default Monarch interrupts the main thread."""
    PACKAGE.replace("monarch.actor:unhandled_fault_hook", react)
