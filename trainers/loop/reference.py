"""Client of the reference model: log-probabilities for a batch, and updates of a lagging copy of the policy."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from forge_env.config.recipe import ReferenceSection
from forge_env.run.account import Since
from forge_env.run.clock import RemoteClock, read_clock
from forge_env.run.timeline import Timeline
from trainers.actors.remote import result
from trainers.buffer.local import LocalReplayBuffer
from trainers.buffer.sequences import Computed

if TYPE_CHECKING:
    from trainers.weights.transport import Published


class Reference:
    """Client of the `ReferenceModel` actor. A lagging copy loads the policy when it is `section.every` versions behind.

    After a resume, a lagging copy starts from the policy of the checkpoint. This equals its earlier weights if
    checkpoints are saved at multiples of `every`.
    """

    def __init__(self, actor: Any, section: ReferenceSection) -> None:
        self.actor = actor
        self._every = section.every
        self.version = 0
        self._seconds: dict[str, float] = {}
        self._since_taken = Since()
        self._clock = RemoteClock()

    async def score(self, buffer: LocalReplayBuffer[Any], step: int, computed: Computed = "all") -> dict[str, float]:
        """Set `ref_logprobs` of the segments of `step` that `computed` selects; return the seconds it took."""
        started = time.perf_counter()
        await result(self.actor.score.call(buffer, step, computed))
        return {"reference_s": time.perf_counter() - started}

    async def follow(self, version: int, published: Published) -> None:
        """Load policy `version` if it is due. Published weights can be read until the next ones are published."""
        if self._every is not None and version - self.version >= self._every:
            await result(self.actor.load_weights.call(published))
            self.version = version

    async def look(self, timeline: Timeline | None) -> None:
        """Fetch the actor's time account and add its spans to the timeline, if any."""
        asked = read_clock()
        self._seconds, spans, remote = await result(self.actor.get_account.call_one())
        self._clock.heard(asked, remote, read_clock())
        if timeline is not None:
            for doing, start, end in spans:
                timeline.span("reference", doing, self._clock.here(start), self._clock.here(end))

    def take_times(self) -> dict[str, float]:
        """Return seconds by activity since the last call, as of the last `look`."""
        return self._since_taken(self._seconds)
