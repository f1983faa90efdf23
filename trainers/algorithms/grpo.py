"""Asynchronous off-policy GRPO.

    tasks --> rollouts --> ReplayBuffer --> TitanTrainer --> Publisher --> Generators
                 ^              ^                |                              |
                 |              +-- slots freed when the weights have arrived --+
                 +------------------ generation continues meanwhile ------------+

Two loops run concurrently: `generate` rolls out groups while the buffer has room, `learn` trains on one batch after
another. Back-pressure: rollouts wait for a slot, the trainer waits for a batch, and a slot is free again only when the
weights trained on it are in the generators. `grpo.max_off_policy_steps` bounds the age of every trained token
(`trainers.buffer.window`); with 0 the same code is synchronous and on-policy.

The parts that researchers change most are plug-ins (`trainers.algorithms.parts`, docs/algorithms.md): the advantage
estimator, the group filter, the mask of learned tokens, the order of tasks, the loss. Time accounts, status,
checkpoints and evaluations belong to the `System` (`trainers.loop.system`). Sources: DeepSeekMath (arXiv 2402.03300)
for the algorithm, Dr. GRPO (arXiv 2503.20783) for the defaults.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from forge_env.config.recipe import RunConfig
from forge_env.environment.optional import scores_groups
from forge_env.errors import UsageError
from forge_env.registry import environment_class
from trainers.algorithms.parts import (
    AdvantageEstimator,
    learned,
    make_advantage,
    make_filter,
    make_mask,
    token_advantages,
)
from trainers.buffer.packed import PackedGroup, pack
from trainers.buffer.types import Ticket
from trainers.loop.method import Method
from trainers.loop.system import Algorithm, System
from trainers.rollout.types import Cut, Group, Preparation, ScoreFunction


class Weighing(Preparation):
    """Preparation of groups in the rollout workers: advantages from the rewards relative to the group."""

    def __init__(self, config: RunConfig, score: ScoreFunction) -> None:
        super().__init__(config, score)
        self.keeps = make_filter(config.grpo.filter)
        self.advantage = make_advantage(config.grpo.advantage)
        self.mask = make_mask(config.grpo.mask)

    async def __call__(self, group: Group) -> PackedGroup | None:
        """Compute advantages and masks and pack the group; None if `grpo.filter` drops it."""
        wanted = [seat for seat in group.by_seat() if self.keeps(seat)]
        if not wanted:
            return None
        advantages = [weights for seat in wanted for weights in token_advantages(self.advantage, seat)]
        episodes = [episode for seat in wanted for episode in seat.valid]
        return pack(episodes, advantages, [learned(self.mask(episode), episode) for episode in episodes])

    def cuts(self, group: Group) -> Sequence[Cut]:
        """The cuts of the advantage estimator."""
        return self.advantage.cuts(group)

    def state_dict(self) -> dict[str, Any]:
        """State of the advantage estimator."""
        return self.advantage.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of the advantage estimator."""
        self.advantage.load_state_dict(state)


class GRPO(Algorithm):
    """Group relative policy optimisation."""

    preparation: ClassVar[type[Preparation]] = Weighing

    def __init__(self, system: System) -> None:
        self.system = system
        self.rollouts, self.buffer = system.rollouts, system.buffer

    @classmethod
    def check(cls, config: RunConfig) -> None:
        """Check a recipe; refuse one whose parts can't be created."""
        make_filter(config.grpo.filter)
        advantage = make_advantage(config.grpo.advantage)
        make_mask(config.grpo.mask)
        if config.grpo.group_size < 2:
            raise UsageError("grpo.group_size=1: GRPO compares the episodes of a group", fix="use 2 or more")
        name = config.environment.name
        if type(advantage).cuts is not AdvantageEstimator.cuts and scores_groups(environment_class(name)):
            raise UsageError(
                f"{name} scores groups, so its episodes can't be continued one by one, as "
                f"grpo.advantage.name={config.grpo.advantage.name} does",
                fix="use another grpo.advantage.name",
            )

    async def generate(self) -> None:
        """Roll out groups while the buffer has room, until cancelled. Cancellation also cancels the rollouts."""
        async with asyncio.TaskGroup() as rollouts:
            while True:
                ticket = await self.system.admit()  # waits for a slot
                rollouts.create_task(self.roll_out(ticket))

    async def roll_out(self, ticket: Ticket) -> None:
        """Roll out one group: a worker runs a task's episodes, scores and prepares them, and adds the group."""
        report = await self.rollouts.group(ticket)
        await self.system.settle(ticket, report)  # if the group was lost or filtered out, another task replaces it

    async def learn(self) -> None:
        """Train on one batch after another. New weights are transferred while the next batch is trained on."""
        async for batch in self.system.batches():  # waits for a batch within the staleness bound
            metrics = await self.system.train(batch)  # reference, loss, gradients, update
            await self.system.publish(batch.step + 1)  # push, pull, swap; then the batch's slots are free
            await self.system.finish_step(batch, metrics)  # log, held-out evaluation, checkpoint


train = Method(GRPO)
