"""Asynchronous off-policy GRPO.

    tasks --> rollouts --> ReplayBuffer --> TitanTrainer --> WeightStore --> Generators
                 ^              ^                |                              |
                 |              +-- slots freed when the weights have arrived --+
                 +------------------ generation goes on meanwhile --------------+

Two loops run side by side: `generate` rolls out groups wherever the buffer has room, `learn` trains on batch after
batch. Back-pressure: rollouts wait for a slot, the trainer waits for a batch, and a slot is free again only when the
weights trained on it are in the generators. `grpo.max_off_policy_steps` bounds the age of every trained token
(`trainers.buffer.window`); with 0 the same code is synchronous and on-policy.

What is often changed is a plug-in each (`trainers.algorithms.parts`, docs/algorithms.md): the advantage estimator,
which groups are kept, what of an episode is learned, the order of tasks, the loss. Accounts, status, checkpoints and
evaluations are the `System`'s (`trainers.loop.system`). Source: DeepSeekMath (arXiv 2402.03300) for the algorithm,
Dr. GRPO (arXiv 2503.20783) for the defaults.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, ClassVar

from forge_env.config.recipe import RunConfig
from forge_env.errors import UsageError
from trainers.algorithms.parts import learned, make_advantage, make_filter, make_mask, token_advantages
from trainers.buffer.packed import PackedGroup, pack
from trainers.buffer.types import Ticket
from trainers.loop.system import Algorithm, Method, System
from trainers.rollout.types import Group, Preparation, ScoreFunction


class Weighing(Preparation):
    """In the rollout workers: an episode is as good as its reward is above that of its group."""

    def __init__(self, config: RunConfig, score: ScoreFunction) -> None:
        super().__init__(config, score)
        self.keeps = make_filter(config.grpo.filter)
        self.advantage = make_advantage(config.grpo.advantage)
        self.mask = make_mask(config.grpo.mask)

    async def __call__(self, group: Group) -> PackedGroup | None:
        """Weigh what was sampled; None where `grpo.filter` doesn't want it."""
        wanted = [own for own in group.by_seat() if self.keeps(own)]
        if not wanted:
            return None
        advantages = [weights for own in wanted for weights in token_advantages(self.advantage, own)]
        episodes = [episode for own in wanted for episode in own.valid]
        return pack(episodes, advantages, [learned(self.mask(episode), episode) for episode in episodes])

    def state_dict(self) -> dict[str, Any]:
        """What the estimator remembers."""
        return self.advantage.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self.advantage.load_state_dict(state)


class GRPO(Algorithm):
    """Group relative policy optimisation."""

    preparation: ClassVar[type[Preparation]] = Weighing

    def __init__(self, system: System) -> None:
        self.system = system
        self.rollouts, self.buffer = system.rollouts, system.buffer

    @classmethod
    def check(cls, config: RunConfig) -> None:
        """Refuse a recipe whose parts can't be made."""
        make_filter(config.grpo.filter)
        make_advantage(config.grpo.advantage)
        make_mask(config.grpo.mask)
        if config.grpo.group_size < 2:
            raise UsageError("grpo.group_size=1: a single episode has nothing to be compared with", fix="use 2 or more")

    async def generate(self) -> None:
        """Roll out a group wherever the buffer has room for one, until cancelled; their rollouts are then too."""
        async with asyncio.TaskGroup() as rollouts:
            while True:
                ticket = await self.system.admit()  # waits for a slot
                rollouts.create_task(self.roll_out(ticket))

    async def roll_out(self, ticket: Ticket) -> None:
        """One group: a worker plays the episodes of a task, scores and weighs them, hands them to the buffer."""
        report = await self.rollouts.group(ticket)
        await self.system.settle(ticket, report)  # lost or not wanted: another task takes its place

    async def learn(self) -> None:
        """Train on batch after batch; the new weights travel while the next batch is trained on."""
        async for batch in self.system.batches():  # waits until one can be given within the staleness bound
            metrics = await self.system.train(batch)  # reference, loss, gradients, update
            await self.system.publish(batch.step + 1)  # pushed, pulled, swapped; then the batch's slots are free
            await self.system.finish_step(batch, metrics)  # logs, held-out score, checkpoint


train = Method(GRPO)
