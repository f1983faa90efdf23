"""Training method `warmup`: only the supervised warm-up, to create a checkpoint that other recipes start from.

`forge-env train FILE method=warmup` writes a Hugging Face folder `model/` in the run's folder; use it as `model.path`.
"""

from __future__ import annotations

import asyncio

import forge_env as fe
from forge_env.config.recipe import RunConfig
from forge_env.errors import UsageError
from forge_env.run import Run
from forge_env.run.scratch import scratch_folder
from forge_env.run.trainer import Trainer
from trainers.loop import checks
from trainers.loop.method import find_hosts
from trainers.loop.prepare import build_tiny, find_model
from trainers.loop.stack import Stack, prepare_controller, unless_stopped
from trainers.loop.warmup import warm_up
from trainers.loop.watchdog import Watchdog


class WarmUp(Trainer):
    """Training of a model on the environment's demonstrations, without sampling."""

    def check(self, config: RunConfig) -> None:
        """Check a recipe; refuse one without warm-up or with settings that can't work."""
        prepare_controller()
        if not checks.warms_up(config):
            raise UsageError("method=warmup: the recipe has no warm-up", fix="set warmup.steps")
        if config.lora is not None:
            raise UsageError("method=warmup trains a whole model, and lora trains adapters only", fix="leave lora out")
        checks.check(config)

    async def __call__(self, run: Run) -> None:
        """Run the warm-up, and save the model in the run's folder after the last step."""
        run.summary["engine"] = "none"
        run.saved(0)
        with scratch_folder():
            prepare_controller()
            async with Stack(run.config, await find_hosts(run)) as stack:
                work = Watchdog(run).while_doing(self._make_model(run, stack))
                await stack.unless_one_dies(unless_stopped(run, work))
                run.stage("shutdown")

    async def _make_model(self, run: Run, stack: Stack) -> None:
        folder, section = run.folder.root / "model", run.config.environment
        environment = fe.make(section.name, **section.options)
        run.stage("trainer", "the trainer is starting")
        start = await find_model(run)
        if start is None:
            start = await asyncio.to_thread(build_tiny, run, environment)
        trainer = await stack.start_trainer(start)
        run.stage("warm-up", "supervised fine-tuning on demonstrations")
        await warm_up(run, environment, trainer, folder, dtype="bfloat16", log=run.log)
        run.saved(run.state.step)
        run.note(f"Use it with: model.path={folder}")


train = WarmUp()
