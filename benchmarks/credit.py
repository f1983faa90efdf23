"""Compare counterfactual advantages with group baselines, at equal samples, in worlds of `text_world`.

The policy is a table of logits for each world, state and command in place of a language model. It is trained by the
policy gradient with the estimators of `trainers.algorithms`; each step has a group of each world. Values are medians
over the seeds until the mean reward of 3 steps is 0.8, with the best of the learning rates 4, 8 and 16. The best is the
one with which most seeds get there within 300,000 commands; ties go to the fewest commands. Commands of continuations
count. Episodes have up to 12 commands at level 1, 40 at level 2.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from benchmarks.frame import main, spread, table
from environments.text_world.environment import TextWorld, TextWorldConfig
from environments.text_world.world import State, World, draw_world
from forge_env.config.recipe import PartSection
from forge_env.policy import Reply
from forge_env.trajectory import Trajectory, Turn
from forge_env.types import Message
from trainers.algorithms.parts import AdvantageEstimator, make_advantage
from trainers.rollout.types import Group

SETTINGS = ((1, 12, 6), (2, 40, 4))
"""Level, maximum commands of an episode, and number of worlds."""
AIM = 0.8
WINDOW = 3
"""Steps whose mean reward is compared with `AIM`."""
MOST = 300_000
"""Maximum sampled commands of a run."""
RATES = (4.0, 8.0, 16.0)
METHODS: dict[str, tuple[str, dict[str, int], int]] = {
    "group_mean, 8": ("group_mean", {}, 8),
    "group_mean, 12": ("group_mean", {}, 12),
    "leave_one_out, 8": ("leave_one_out", {}, 8),
    "counterfactual, 8, budget 8": ("counterfactual", {"budget": 8, "each": 1}, 8),
    "counterfactual, 8, budget 16": ("counterfactual", {"budget": 16, "each": 2}, 8),
    "counterfactual, 8, budget 32": ("counterfactual", {"budget": 32, "each": 2}, 8),
}
"""Label -> estimator, options and group size."""
_PIECE = [1]
_TURN = Turn([], Reply(Message(role="assistant"), _PIECE, _PIECE, [0.0], [0]))  # type: ignore[arg-type]


class Played(NamedTuple):
    """An episode: the states and chosen commands, and its reward."""

    states: list[State]
    choices: list[int]
    reward: float


@dataclass
class Table:
    """Softmax policy with a logit for each state and command of one world."""

    world: World
    logits: dict[State, list[float]] = field(default_factory=dict)

    def chances(self, state: State) -> list[float]:
        """Probabilities of the possible commands."""
        logits = self.logits.setdefault(state, [0.0] * len(self.world.commands(state)))
        weights = [math.exp(logit - max(logits)) for logit in logits]
        total = math.fsum(weights)
        return [weight / total for weight in weights]

    def play(self, state: State, turns: int, rng: random.Random) -> Played:
        """Play up to `turns` commands from a state."""
        states, choices = [], []
        for _ in range(turns):
            if self.world.done(state):
                break
            chances = self.chances(state)
            choice = rng.choices(range(len(chances)), chances)[0]
            states.append(state)
            choices.append(choice)
            state = self.world.after(state, self.world.commands(state)[choice])
        return Played(states, choices, float(self.world.done(state)))

    def learn(self, episodes: Sequence[Played], advantages: Sequence[Sequence[float]], rate: float) -> None:
        """Follow the policy gradient."""
        moves: list[tuple[State, list[float]]] = []
        for played, weights in zip(episodes, advantages, strict=True):
            for state, choice, weight in zip(played.states, played.choices, weights, strict=True):
                score = [-weight * chance for chance in self.chances(state)]
                score[choice] += weight
                moves.append((state, score))
        for state, score in moves:
            self.logits[state] = [a + rate * b / len(episodes) for a, b in zip(self.logits[state], score, strict=True)]


def step(
    policy: Table, estimator: AdvantageEstimator, size: int, turns: int, rate: float, rng: random.Random
) -> tuple[float, int]:
    """One group of one world; returns its mean reward and the number of sampled commands."""
    episodes = [policy.play(policy.world.start, turns, rng) for _ in range(size)]
    group = Group([Trajectory("", "", "", turns=[_TURN] * len(one.choices), reward=one.reward) for one in episodes])
    cost = sum(len(played.choices) for played in episodes)
    for cut in estimator.cuts(group):
        state = episodes[cut.episode].states[cut.turn]
        for _ in range(cut.number):
            again = policy.play(state, turns - cut.turn, rng)
            cost += len(again.choices)
            group.continued.setdefault(cut[:2], []).append(again.reward)
    weights = [
        [float(weight)] * len(played.choices) if isinstance(weight, int | float) else [float(each) for each in weight]
        for weight, played in zip(estimator(group), episodes, strict=True)
    ]
    policy.learn(episodes, weights, rate)
    return group.mean_reward, cost


def worlds(level: int, number: int) -> list[World]:
    """The first worlds of a level."""
    env = TextWorld(TextWorldConfig(levels=[level]))
    tasks = (env.task("train", index) for index in range(number))
    return [draw_world(task.data["public_world"], task.difficulty) for task in tasks]


def run(setting: tuple[int, int, int], method: str, seed: int, rate: float) -> tuple[int, int] | None:
    """Steps and sampled commands until the reward is `AIM`; None if that takes more than `MOST` commands."""
    level, turns, number = setting
    name, options, size = METHODS[method]
    estimator = make_advantage(PartSection(name=name, options=options))
    rng, policies = random.Random(f"{method}/{seed}"), [Table(world) for world in worlds(level, number)]
    cost, rewards = 0, list[float]()
    while cost < MOST:
        played = [step(policy, estimator, size, turns, rate, rng) for policy in policies]
        cost += sum(commands for _, commands in played)
        rewards.append(statistics.fmean(reward for reward, _ in played))
        if len(rewards) >= WINDOW and statistics.fmean(rewards[-WINDOW:]) >= AIM:
            return len(rewards), cost
    return None


def compare(setting: tuple[int, int, int], seeds: int) -> list[list[object]]:
    """Rows of all methods, each with the rate at which it needs the fewest commands."""
    rows: list[list[object]] = []
    for method in METHODS:
        tried: list[tuple[int, float, float, list[tuple[int, int]]]] = []
        for rate in RATES:
            ends = [end for seed in range(seeds) if (end := run(setting, method, seed, rate)) is not None]
            cost = statistics.median([commands for _, commands in ends] or [0])
            tried.append((seeds - len(ends), cost, rate, ends))
        missed, _, rate, ends = min(tried)
        steps, thousands = [steps for steps, _ in ends], [commands / 1000 for _, commands in ends]
        worlds = f"{setting[2]} of level {setting[0]}"
        row: list[object] = [worlds, method, rate, f"{seeds - missed} of {seeds}"]
        row += [spread(steps), spread(thousands)] if ends else ["-", "-"]
        rows.append(row)
    return rows


def measure(args: argparse.Namespace) -> list[str]:
    rows: list[list[object]] = []
    for setting in SETTINGS[: args.levels]:
        rows += compare(setting, args.seeds)
    columns = ["worlds", "advantages, group size", "learning rate", "seeds", f"steps to {AIM}", "thousand commands"]
    return table(columns, rows)


if __name__ == "__main__":
    main("Counterfactual advantages", measure, levels=2, seeds=5)
