"""All generators of a run behind one handle."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Hashable
from typing import Any

from forge_env.errors import GeneratorError
from trainers.actors.remote import result
from trainers.generator.routing import Router
from trainers.generator.types import Completion, EngineFailedError, SamplingOptions


class GeneratorPool:
    """All generators: a request goes to one of them (`Router`), weights go to all."""

    def __init__(self, actors: list[Any]) -> None:
        self._actors = actors
        self._router = Router(len(actors))
        self._names = itertools.count()
        self._failure: EngineFailedError | None = None

    def check(self) -> None:
        """Raise what has ended an engine: its replica would answer every request at once, with that."""
        if self._failure is not None:
            raise self._failure

    async def generate(self, prompt_ids: list[int], options: SamplingOptions, session: Hashable = None) -> Completion:
        """One completion; a cancelled call ends the request in its replica too.

        Args:
            prompt_ids: tokens to condition on, [P].
            options: how to sample.
            session: the conversation it belongs to, which stays on one replica where it can.
        """
        replica = self._router.choose(prompt_ids, session)
        actor, request_id = self._actors[replica], f"pool-{next(self._names)}"
        try:
            values = {name: getattr(options, name) for name in options.__slots__}
            completion: Completion = await result(actor.generate.call_one(prompt_ids, values, request_id))
        except asyncio.CancelledError:
            actor.abort.broadcast(request_id)
            raise
        except EngineFailedError as error:
            self._failure = EngineFailedError(f"generator {replica}: {error}", fix="see run.log, then --resume")
            raise
        except GeneratorError:
            raise
        except Exception as error:  # task boundary: whatever a remote process raised, or Monarch about its end
            raise GeneratorError(f"generator {replica} failed: {type(error).__name__}: {error}") from error
        finally:
            self._router.done(replica)
        return completion

    async def setup(self) -> None:
        """Load the model in every replica."""
        await asyncio.gather(*(result(actor.setup.call()) for actor in self._actors))

    async def preload(self) -> None:
        """Import vLLM in every replica, ahead of `setup`."""
        await asyncio.gather(*(result(actor.preload.call()) for actor in self._actors))

    async def update_weights(self, version: int) -> dict[str, float]:
        """Swap the weights everywhere; the slowest replica's times."""
        results = await asyncio.gather(*(result(actor.update_weights.call_one(version)) for actor in self._actors))
        return {name: max(each[name] for each in results) for name in results[0]}

    async def stats(self) -> dict[str, float]:
        """Counters summed over replicas."""
        results = await asyncio.gather(*(result(actor.get_stats.call_one()) for actor in self._actors))
        names = dict.fromkeys(name for each in results for name in each)
        return {name: sum(each.get(name, 0.0) for each in results) for name in names}

    async def halt(self) -> None:
        """Abort everything in flight."""
        await asyncio.gather(*(result(actor.halt.call()) for actor in self._actors))
