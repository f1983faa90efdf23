"""A recipe's `method`: checks a recipe, starts its actors, and runs an algorithm on them."""

from __future__ import annotations

import asyncio
import logging
import warnings
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

import forge_env as fe
from forge_env.config.recipe import RunConfig
from forge_env.environment.base import Environment
from forge_env.errors import PluginError
from forge_env.job.survey import survey
from forge_env.rewards.rubric import reward_definition
from forge_env.run import Run
from forge_env.run.fingerprint import Replayed
from forge_env.run.recording import Recording
from forge_env.run.scratch import scratch_folder
from forge_env.run.trainer import Question, ReplayQuestion, Trainer
from trainers.loop import checks
from trainers.loop.checkpoints import Checkpoints, saved_in
from trainers.loop.prepare import find_model, start_actors
from trainers.loop.stack import Stack, prepare_controller, tell_of_rdma, unless_stopped
from trainers.loop.system import Algorithm, System
from trainers.loop.watchdog import Watchdog
from trainers.plan.report import plan

if TYPE_CHECKING:
    from trainers.actors.hosts import Hosts

HALT_S = 10.0
"""Seconds that the generators may take to abort their requests."""
logger = logging.getLogger(__name__)


class Method(Trainer):
    """Adapter that makes an algorithm usable as a recipe's `method` (entry points `forge_env.trainers`)."""

    def __init__(self, algorithm: type[Algorithm]) -> None:
        self.algorithm = algorithm

    def check(self, config: RunConfig) -> None:
        """Reject a recipe that can't work, before anything is started."""
        prepare_controller()
        if self.algorithm.preparation is None:
            raise PluginError(
                f"{self.algorithm.__name__}.preparation is missing: it processes groups in rollout workers",
                fix="derive a class from trainers.rollout.types.Preparation, and assign it to that attribute",
            )
        checks.check(config)
        self.algorithm.check(config)

    def plan(self, config: RunConfig, question: Question) -> Iterator[str]:
        """Forecast the resources that a recipe needs, as lines of text."""
        return plan(config, question)

    def replay(self, recording: Recording, config: RunConfig, question: ReplayQuestion) -> Iterator[Replayed]:
        """Train recorded steps again in this process, and compare each with its record."""
        prepare_controller()
        warnings.filterwarnings("ignore", module=r"(torch|vllm)\.")  # of checkpoints in a process without ranks
        if question.tokens:
            from trainers.replay.sampling import prepare

            prepare(config)
        from trainers.replay.training import replay  # takes seconds: torch

        return replay(recording, config, question, saved_in(recording.folder.checkpoints))

    async def __call__(self, run: Run) -> None:
        """Run the recipe `run.config` until it is complete or `run.stop` is set."""
        with scratch_folder():
            prepare_controller()
            await self.play(run)

    async def play(self, run: Run) -> None:
        """Start all actors of the recipe and run the algorithm on them."""
        config, checkpoints = run.config, Checkpoints(run)
        checkpoints.tidy()
        if run.resume and _complete(run, checkpoints.step):
            run.note(f"All {config.grpo.steps} steps are done: nothing to resume. More: --grpo.steps N")
            return
        tell_of_rdma(run)
        run.stage("model", config.model.path)
        model = await find_model(run)
        if run.resume:
            await asyncio.to_thread(checkpoints.verify, model)
        environment: Environment = fe.make(config.environment.name, **config.environment.options)
        run.facts["reward"] = reward_definition(environment)
        preparation = self.algorithm.preparation
        assert preparation is not None  # guaranteed by `check`
        async with Stack(config, await find_hosts(run)) as stack:
            starting = Watchdog(run).while_doing(start_actors(run, stack, environment, model, preparation))
            actors = await stack.unless_one_dies(unless_stopped(run, starting))
            if actors is None:
                run.note("stopped before training began: nothing to save")
                return
            system = System(run, stack, actors)
            try:
                await system.run_to_end(self.algorithm(system))
                run.stage("shutdown")
            finally:
                await actors.rollouts.close()
            with suppress(TimeoutError):  # a generator that hangs is killed when the stack closes
                async with asyncio.timeout(HALT_S):
                    await actors.generators.halt()
        checkpoints.tidy()


async def find_hosts(run: Run) -> Hosts | None:
    """Survey the hosts of the run; None if it runs on this machine alone."""
    surveyed = await survey(run.config, run.folder.root)
    if surveyed is None:
        return None
    from trainers.actors.hosts import Hosts

    logger.info("%s", surveyed.plan)
    return Hosts(run, surveyed)


def _complete(run: Run, step: int) -> bool:
    """Whether every step is trained and the final held-out score is recorded."""
    steps, split = run.config.grpo.steps, run.config.evaluation.split
    return step >= steps and any(item.step >= steps and item.split == split for item in run.state.evaluations)
