"""The clocks of other machines: what happened there, at the time that it was here."""

from __future__ import annotations

import logging
import math
import os
import time
from functools import cache
from typing import NamedTuple

DRIFT = 1e-4
"""Seconds that two clocks may drift apart each second; those of usual machines stay below half of that."""
logger = logging.getLogger(__name__)


class Reading(NamedTuple):
    """What a process's clocks say.

    Attributes:
        host: name of its machine.
        boot: id of the machine's present life: all its processes have one clock.
        at: seconds of that (`time.perf_counter`).
        wall: seconds of the wall clock, at that time.
    """

    host: str
    boot: str
    at: float
    wall: float


def read_clock() -> Reading:
    """Of this process, now."""
    return Reading(os.uname().nodename, _boot(), time.perf_counter(), time.time())


@cache
def _boot() -> str:
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()


class RemoteClock:
    """By how much the clock of a process is ahead of this one's, as far as its answers tell.

    What it read lies between the question and the answer, so half of the time between them is the most that its middle
    can be wrong (Cristian, Probabilistic clock synchronization, 1989). The best answer counts until clocks may have
    drifted further than a newer one can be wrong.

        asked = read_clock()
        clock.heard(asked, await ask(), read_clock())
        clock.here(seconds)

    Attributes:
        ahead: seconds.
        uncertain: the most, in seconds, that it can be wrong.
    """

    def __init__(self) -> None:
        self.ahead = 0.0
        self.uncertain = math.inf
        self._reading: Reading | None = None
        self._told = math.inf

    def heard(self, asked: Reading, told: Reading, answered: Reading) -> None:
        """It was asked, told what its clock says, and its answer was heard."""
        if self._reading is None or told.boot != self._reading.boot:
            self.uncertain = self._told = math.inf
        before, self._reading = self._reading, told
        if told.boot == answered.boot:  # one machine, one clock
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
                "the clock of %s is %.4f s ahead of this one's, give or take %.4f s; the timeline uses this one",
                told.host,
                wall,
                self.uncertain,
            )

    def here(self, at: float) -> float:
        """What this process's clock said when the other's said `at`."""
        return at - self.ahead
