"""Clocks of other machines: conversion of their timestamps to the clock of this process."""

from __future__ import annotations

import logging
import math
import os
import time
from typing import NamedTuple

from forge_env.machine import boot_id

DRIFT = 1e-4
"""Maximum drift between two clocks, in seconds per second; usual machines drift less than half of that."""
logger = logging.getLogger(__name__)


class Reading(NamedTuple):
    """One reading of a process's clocks.

    Attributes:
        boot: id of the machine's current boot: all processes of one boot share one monotonic clock.
    """

    host: str
    boot: str
    at: float
    wall: float


def read_clock() -> Reading:
    """Read the clocks of this process."""
    return Reading(os.uname().nodename, boot_id(), time.perf_counter(), time.time())


class RemoteClock:
    """Estimated offset of another process's clock from this one's.

    The remote reading was taken between question and answer, so the midpoint of the two is off by at most half of the
    round trip (Cristian, Probabilistic clock synchronization, 1989). The best estimate is used until possible drift
    makes it less certain than a newer one.

        asked = read_clock()
        clock.heard(asked, await ask(), read_clock())
        clock.here(seconds)

    Attributes:
        ahead: seconds by which the other clock is ahead of this one.
        uncertain: maximum error of `ahead`, in seconds.
    """

    def __init__(self) -> None:
        self.ahead = 0.0
        self.uncertain = math.inf
        self._reading: Reading | None = None
        self._told = math.inf

    def heard(self, asked: Reading, told: Reading, answered: Reading) -> None:
        """Update the estimate with one exchange."""
        if self._reading is None or told.boot != self._reading.boot:
            self.uncertain = self._told = math.inf
        before, self._reading = self._reading, told
        if told.boot == answered.boot:  # same machine, same clock
            self.ahead = self.uncertain = 0.0
            return
        uncertain = (answered.at - asked.at) / 2
        since = 0.0 if before is None else max(0.0, told.at - before.at)
        self.uncertain += DRIFT * since
        if uncertain < self.uncertain:
            self.ahead, self.uncertain = told.at - (asked.at + answered.at) / 2, uncertain
        if self.uncertain < self._told / 2:
            self._told = self.uncertain
            wall = told.wall - (answered.wall - (answered.at - self.here(told.at)))
            logger.info(
                "the clock of %s is %.4f s ahead of this machine's (error up to %.4f s); the timeline uses the latter",
                told.host,
                wall,
                self.uncertain,
            )

    def here(self, at: float) -> float:
        """Convert the other clock's time `at` to this process's clock."""
        return at - self.ahead
