"""Compare asynchronous with synchronous training: same code, seed and hardware; only `max_off_policy_steps` differs.

The recipe is `coding_rlvr` with tools that wait a second. A synchronous step spends its time on generation, tools and
training, one after the other. A step has 12 groups of 8. Trainer and generator have a core each. The learning rate is
close to zero, since learning would change the length of episodes. An ideal step takes as long as the longest of
generation, tools and training in the synchronous run. It can be beaten, because tools and decoding of several steps
overlap. The second table shows how each actor spent its time. In its last column, training takes longer
(`trainer.activation_checkpoint=full trainer.minibatches=4 grpo.loss.options.correction=tis`), so that generation keeps
up. Runs that have succeeded are not repeated.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from itertools import pairwise
from typing import Any

from benchmarks.frame import main, summary, table, train, trained
from environments.coding_rlvr.checks import Check
from environments.coding_rlvr.environment import CodingRLVR, CodingRLVRConfig
from forge_env.display.curves import time_account
from forge_env.sandbox import CallsResult

RECIPE = [
    "environment.name=benchmarks.asynchrony:SlowTools",
    *("model.path=tiny", "warmup.steps=800"),
    "trainer.optimizer.lr=1e-12",
    "trainer.threads=1",
    "generator.threads=1",
    "grpo.groups_per_step=12",
    "evaluation.every=0",
    "evaluation.num_tasks=8",
    "evaluation.extra_splits=[]",
    "logging.trajectories=none",
]
LONGER = ["trainer.activation_checkpoint=full", "trainer.minibatches=4", "grpo.loss.options.correction=tis"]


class SlowToolsConfig(CodingRLVRConfig):
    """Options of `coding_rlvr`, and the delay."""

    tool_latency_s: float = 1.0
    """Seconds added to every run of a program."""


class SlowTools(CodingRLVR):
    """`coding_rlvr` with a delay before every run of a program, including those for scoring."""

    config_class = SlowToolsConfig
    config: SlowToolsConfig

    async def _run(self, code: str, tests: list[Check]) -> CallsResult:
        await asyncio.sleep(self.config.tool_latency_s)
        return await super()._run(code, tests)


def result(args: argparse.Namespace, staleness: int, extra: list[str] | None = None) -> dict[str, Any]:
    """Train once; return the duration of steps and the time accounts, without steps that fill or drain the pipeline."""
    steps = args.steps * 4 // 3 if extra else args.steps
    keys = [*RECIPE, f"environment.options.tool_latency_s={args.latency}", f"grpo.steps={steps}", *(extra or [])]
    name = f"asynchrony-{args.latency:g}-{staleness}-{'longer' if extra else 'equal'}-{args.seed}"
    folder = train(name, *keys, f"grpo.max_off_policy_steps={staleness}", f"seed={args.seed}")
    full = trained(folder)[staleness + 2 : -(staleness + 1)]
    seconds = [later["time"] - row["time"] for row, later in pairwise(full)]
    return {
        "name": f"{staleness}, longer training" if extra else f"{staleness}",
        "step_s": statistics.fmean(seconds),
        "spread": statistics.stdev(seconds),
        "tokens_per_s": sum(row["trainer/tokens"] for row in full[1:]) / sum(seconds),
        "account": time_account(full),
        **summary(folder),
    }


def busy(result: dict[str, Any], actor: str) -> float:
    """Return the share of its time in which an actor is not waiting."""
    account: dict[str, float] = result["account"][actor]
    return 1.0 - sum(share for doing, share in account.items() if doing.startswith("wait"))


def rows_of(results: list[dict[str, Any]]) -> list[list[object]]:
    """Return one row for each degree of asynchrony, relative to the first, synchronous result."""
    sync = results[0]
    working = {actor: sync["step_s"] * busy(sync, actor) for actor in ("generator", "trainer")}
    longest = max(*working.values(), sync["step_s"] - sum(working.values()))  # the remainder is tool time
    ideal = sync["tokens_per_s"] * sync["step_s"] / longest
    rows: list[list[object]] = []
    for each in results:
        speed = [f"{each['tokens_per_s'] / sync['tokens_per_s']:.2f}x", f"{each['tokens_per_s'] / ideal:.0%}"]
        shares = [f"{busy(each, actor):.0%}" for actor in working]
        step = f"{each['step_s']:.2f} ± {each['spread']:.2f}"
        ages = [each["max_staleness"], each["tokens_discarded_stale"]]
        rows.append([each["name"], step, each["tokens_per_s"], *speed, *shares, *ages])
    return rows


def accounts_of(results: list[dict[str, Any]]) -> list[list[object]]:
    """Return each actor's share of time per activity, a column per result; leave out activities below 1 %."""
    accounts = [each["account"] for each in results]
    activities = dict.fromkeys((actor, doing) for account in accounts for actor in account for doing in account[actor])
    rows = {key: [account.get(key[0], {}).get(key[1], 0.0) for account in accounts] for key in activities}
    return [[*key, *(f"{share:.1%}" for share in shares)] for key, shares in rows.items() if max(shares) >= 0.01]


def measure(args: argparse.Namespace) -> list[str]:
    degrees = sorted({0, *args.staleness})
    results = [result(args, staleness) for staleness in degrees]
    rows = rows_of(results)
    results.append(result(args, 2 * max(1, degrees[-1]), LONGER))
    speed = ["off-policy", "s a step", "trained tokens/s", "of synchronous", "of the ideal"]
    columns = [*speed, "generator busy", "trainer busy", "oldest token", "discarded"]
    times = ["actor", "its time", *(each["name"] for each in results)]
    return [*table(columns, rows), "", *table(times, accounts_of(results))]


if __name__ == "__main__":
    main("Asynchronous against synchronous", measure, staleness=[0, 1, 2, 4], steps=30, latency=1.0, seed=0)
