"""Python's garbage collector while thousands of samples are under way.

By default it looks for cycles after every 700 new objects, and at all objects alive a few times a minute: with 10,000
requests in flight that is half of the time a request costs. Here it looks only after so many new objects that most of
those of finished samples are gone by then: what is looked at is what is in flight, and that seldom.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

SELDOM = (200_000, 50, 10)

_lock = threading.Lock()
_users = 0
_before = (0, 0, 0)


@contextmanager
def collecting_seldom() -> Iterator[None]:
    """A block of much concurrency; the process's own thresholds are back when the last such block has ended."""
    global _users, _before
    with _lock:
        _users += 1
        if _users == 1:
            _before = gc.get_threshold()
            if 0 < _before[0] < SELDOM[0]:  # 0: somebody has turned it off
                gc.set_threshold(*SELDOM)
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if _users == 0:
                gc.set_threshold(*_before)
