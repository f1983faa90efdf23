"""Compare asynchronous with synchronous training: same code, seed and hardware; only `max_off_policy_steps` differs.

python -m benchmarks asynchrony --steps 24 --latency 1.0 --staleness 0 1 2 4

The environment is `coding_rlvr` with tools that wait (`benchmarks.slow_tools`), so that a synchronous step spends its
time on generation, tools and training one after the other. Trainer and generator have one CPU core each. The learning
rate is close to zero: learning would change the length of episodes, and so the amount of work. Reported are seconds per
step and trained tokens per second while the pipeline is full, and their ratio to the ideal: the longest of the three
stages of the synchronous run, with generation and training taken as the busy times of generator and trainer. With one
core each, generation is slower than training. One extra run, twice as far off-policy, recomputes activations and
corrects minibatches in the trainer, so that generation keeps up and the trainer's remaining waits become visible.
Runs that have succeeded are not repeated, so the benchmark can be interrupted.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.report import has_succeeded, record, table
from forge_env.display.curves import merge_rows, time_account
from forge_env.run.metrics import read_metrics

ENVIRONMENT = "benchmarks.slow_tools:SlowTools"
RECIPE = [
    f"environment.name={ENVIRONMENT}",
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


LONGER_TRAINING = [
    "trainer.activation_checkpoint=full",
    "trainer.minibatches=4",
    "grpo.loss.options.correction=tis",
]


@dataclass(frozen=True)
class Arm:
    """One run: its staleness bound, and whether training takes longer than generation."""

    staleness: int
    longer: bool = False

    def __str__(self) -> str:
        return f"{self.staleness}, longer training" if self.longer else f"{self.staleness}"


def train(arm: Arm, steps: int, latency: float, seed: int, extra: list[str]) -> Path:
    """Train one run and return its folder."""
    kind = "longer" if arm.longer else "equal"
    folder = Path("runs") / f"asynchrony-{latency:g}-{arm.staleness}-{kind}-{seed}"
    if has_succeeded(folder):
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    overrides = [
        *RECIPE,
        f"environment.options.tool_latency_s={latency}",
        f"grpo.steps={steps}",
        f"grpo.max_off_policy_steps={arm.staleness}",
        *(LONGER_TRAINING if arm.longer else []),
        f"seed={seed}",
        *extra,
    ]
    command = [sys.executable, "-m", "forge_env", "train", "coding_rlvr.yaml", "--name", folder.name, *overrides]
    subprocess.run(command, check=True)
    return folder


def read(folder: Path, arm: Arm) -> dict[str, Any]:
    """Return the duration of steps and the trainer's time account, without steps that fill or drain the pipeline."""
    rows = [row for row in merge_rows(read_metrics(folder / "metrics.jsonl")) if "reward/mean" in row]
    full = rows[arm.staleness + 2 : -(arm.staleness + 1)]
    seconds = [later["time"] - row["time"] for row, later in pairwise(full)]
    summary = json.loads((folder / "summary.json").read_text())
    return {
        "arm": str(arm),
        "step_s": statistics.fmean(seconds),
        "spread": statistics.stdev(seconds),
        "tokens_per_s": sum(row["trainer/tokens"] for row in full[1:]) / sum(seconds),
        "account": time_account(full),
        "max_staleness": summary["max_staleness"],
        "discarded": summary["tokens_discarded_stale"],
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
    for result in results:
        speed = [f"{result['tokens_per_s'] / sync['tokens_per_s']:.2f}x", f"{result['tokens_per_s'] / ideal:.0%}"]
        shares = [f"{busy(result, actor):.0%}" for actor in working]
        step = f"{result['step_s']:.2f} ± {result['spread']:.2f}"
        rows.append(
            [result["arm"], step, result["tokens_per_s"], *speed, *shares, result["max_staleness"], result["discarded"]]
        )
    return rows


def accounts_of(results: list[dict[str, Any]]) -> list[list[object]]:
    """Return the share of time that each actor spent on each activity, a column per result, without constant rows."""
    accounts = [result["account"] for result in results]
    activities = dict.fromkeys(
        (actor, activity) for account in accounts for actor in account for activity in account[actor]
    )
    rows = {key: [f"{account.get(key[0], {}).get(key[1], 0.0):.1%}" for account in accounts] for key in activities}
    return [[*key, *shares] for key, shares in rows.items() if set(shares) not in ({"0.0%"}, {"100.0%"})]


def main() -> None:
    """Train with each degree of asynchrony and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--staleness", type=int, nargs="*", default=[0, 1, 2, 4])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--latency", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("overrides", nargs="*", help="further overrides of the recipe, a.b=c")
    args = parser.parse_args()
    arms = [Arm(staleness) for staleness in sorted({0, *args.staleness})]
    results = [read(train(arm, args.steps, args.latency, args.seed, args.overrides), arm) for arm in arms]
    rows = rows_of(results)
    if arms[-1].staleness > 0:
        arm = Arm(2 * arms[-1].staleness, longer=True)
        steps = args.steps * 4 // 3  # filling and draining the pipeline takes more steps
        results.append(read(train(arm, steps, args.latency, args.seed, args.overrides), arm))
    shares = ["generator busy", "trainer busy"]
    columns = [
        "off-policy",
        "s a step",
        "trained tokens/s",
        "of synchronous",
        "of the ideal",
        *shares,
        "oldest token",
        "discarded",
    ]
    lines = table(columns, rows)
    print("\n".join(lines))
    about = (
        f"Tools wait {args.latency:g} s; {args.steps} steps of 12 groups of 8; trainer and generator have a core each. "
        "The ideal is a step as long as the longest of generation, tools and training in the synchronous run; it can "
        "be beaten, because several steps have their tools run and their batches decoded at the same time."
    )
    names = ["actor", "its time", *(result["arm"] for result in results)]
    intro = (
        "Where the time of each actor went, by steps off-policy; in the last column training takes longer "
        f"(`{' '.join(LONGER_TRAINING)}`), so that generation keeps up:"
    )
    account = [intro, "", *table(names, accounts_of(results))]
    print("\n".join(account))
    text = [*lines, "", about, "", *account]
    title = "Asynchronous against synchronous"
    record("asynchrony", title, "make bench ARGS=asynchrony", text)


if __name__ == "__main__":
    main()
