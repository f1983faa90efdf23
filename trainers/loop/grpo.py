"""Asynchronous off-policy GRPO: the recipe's main loop.

    tasks --> rollouts --> ReplayBuffer --> TitanTrainer --> WeightStore --> Generators
                 ^              ^                |                              |
                 |              +-- slots freed when the weights have arrived --+
                 +------------------ generation goes on meanwhile --------------+

Back-pressure: rollouts wait for a slot, the trainer waits for a batch, and a slot is free again only when the
weights trained on it are in the generators. `max_off_policy_steps` bounds the age of every trained token
(`trainers.buffer.window`); with 0 the same code is synchronous and on-policy.

Every loop is a child of one task group: the first failure cancels the others and ends the run with its cause.
"""

from __future__ import annotations

import forge_env as fe
from forge_env.config.recipe import RunConfig
from forge_env.environment.base import Environment
from forge_env.run import Run
from forge_env.run.scratch import scratch_folder
from forge_env.sandbox import SandboxEngine, open_engine
from trainers.loop import checks
from trainers.loop.stack import Stack, prepare_controller
from trainers.loop.stopping import unless_stopped


def check(config: RunConfig) -> None:
    """Refuse a recipe that can't work, before anything is started."""
    prepare_controller()
    checks.check(config)


async def train(run: Run) -> None:
    """Run the recipe `run.config` to its end, or until `run.stop`."""
    with scratch_folder():
        prepare_controller()
        from trainers.actors.faults import unless_a_process_dies

        await unless_a_process_dies(_train(run))


async def _train(run: Run) -> None:
    from trainers.loop.checkpoints import Checkpoints
    from trainers.loop.prepare import find_model, prepare_model

    config = run.config
    if run.resume and _complete(run, Checkpoints(run).step):
        run.note(f"All {config.grpo.steps} steps are done: nothing to resume. More: --grpo.steps N")
        return
    run.stage("model", config.model.path)
    found = await find_model(run)
    run.stage("sandbox", config.sandbox.engine)
    options = {"concurrency": config.sandbox.concurrency, "base_image": config.sandbox.base_image}
    engine = open_engine(config.sandbox.engine, **{key: value for key, value in options.items() if value is not None})
    stack = Stack(config)
    async with engine, stack:
        run.summary["engine"] = engine.name
        run.note(f"Sandbox engine: {engine.name}")
        environment = _make_environment(run, engine)
        prepared = await unless_stopped(run, prepare_model(run, stack, environment, found))
        if prepared is not None:
            from trainers.loop.session import Session

            await Session(run, prepared, lambda: _make_environment(run, engine)).run_to_end()
            run.stage("shutdown")
            await prepared.generators.halt()
        else:
            run.note("stopped before training began: nothing to save")


def _complete(run: Run, step: int) -> bool:
    """Every step is trained, and the final held-out score is there."""
    steps, split = run.config.grpo.steps, run.config.evaluation.split
    return step >= steps and any(item.step >= steps and item.split == split for item in run.state.evaluations)


def _make_environment(run: Run, engine: SandboxEngine) -> Environment:
    section = run.config.environment
    environment: Environment = fe.make(section.name, sandboxes=engine, **section.options)
    return environment
