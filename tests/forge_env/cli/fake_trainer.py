"""A trainer for tests of the command line: `method=tests.forge_env.cli.fake_trainer:train`."""

from __future__ import annotations

from forge_env.config import RunConfig
from forge_env.errors import UsageError
from forge_env.run import Run
from forge_env.run.trainer import Trainer

RECIPE_KEYS = ("seed", "grpo")


async def train(run: Run) -> None:
    run.stage("training")
    run.evaluation(0, "eval", 0.4, 16, 0.1)
    for step in range(1, run.config.grpo.steps + 1):
        run.log(step, {"reward/mean": step / run.config.grpo.steps})
    run.evaluation(run.config.grpo.steps, "eval", 0.8, 16, 0.1)
    run.note(f"seed {run.config.seed}")


class Careful(Trainer):
    def check(self, config: RunConfig) -> None:
        if config.seed == 13:
            raise UsageError("seed 13 brings bad luck", fix="use another")

    async def __call__(self, run: Run) -> None:
        await train(run)


careful = Careful()


async def fail(run: Run) -> None:
    raise RuntimeError("boom")
