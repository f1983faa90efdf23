"""The reference model as the loop sees it: log-probabilities for a batch, and when a lagging copy catches up."""

from __future__ import annotations

import time
from typing import Any

from forge_env.config.recipe import ReferenceSection
from forge_env.run.account import Since
from forge_env.run.clock import RemoteClock, read_clock
from forge_env.run.timeline import Timeline
from trainers.actors.remote import result
from trainers.buffer.sequences import Computed
from trainers.buffer.types import GroupBuffer


class Reference:
    """The `ReferenceModel` actor. A lagging copy becomes the policy when it is `section.every` versions behind.

    After a resume a lagging copy starts from the policy of the checkpoint: the copy it had, where checkpoints are
    saved at multiples of `every`.

    Args:
        actor: `ReferenceModel`, which does one thing at a time.
        section: of the recipe.
    """

    def __init__(self, actor: Any, section: ReferenceSection) -> None:
        self.actor = actor
        self._every = section.every
        self.version = 0
        self._seconds: dict[str, float] = {}
        self._since_taken = Since()
        self._clock = RemoteClock()

    async def score(self, buffer: GroupBuffer[Any], step: int, computed: Computed = "all") -> dict[str, float]:
        """Give the segments of `step` that are `computed` their `ref_logprobs`; returns the seconds it took."""
        started = time.perf_counter()
        await result(self.actor.score.call(buffer, step, computed))
        return {"reference_s": time.perf_counter() - started}

    async def follow(self, version: int) -> None:
        """Policy `version` is published, and held by the store until the next one is."""
        if self._every is not None and version - self.version >= self._every:
            await result(self.actor.load_version.call(version))
            self.version = version

    async def look(self, timeline: Timeline | None) -> None:
        """Ask what it has done with its time, which goes on the timeline."""
        asked = read_clock()
        self._seconds, spans, told = await result(self.actor.get_account.call_one())
        self._clock.heard(asked, told, read_clock())
        if timeline is not None:
            for doing, start, end in spans:
                timeline.span("reference", doing, self._clock.here(start), self._clock.here(end))

    def take_times(self) -> dict[str, float]:
        """Seconds by what was done, since the last call, as far as `look` has seen."""
        return self._since_taken(self._seconds)
