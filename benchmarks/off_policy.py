"""Measure the cost of staleness: learning at 0 to 8 steps off-policy, with and without correction, over seeds.

Scores are held-out pass@1 on 192 tasks after training, as the median (range) over the seeds. "Corrected" is the default
recipe's loss with the clipped importance ratio of each token to the policy version that sampled it; "uncorrected" is
the plain policy gradient. A step is one update of a batch half the size of the default recipe's, so that at 0 steps
off-policy one run serves for both. Runs that have succeeded are not repeated.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

from benchmarks.frame import main, metrics, spread, summary, table, train
from benchmarks.learning import COLORS, figure
from forge_env.display.curves import score_curve

RECIPE = [
    *("model.path=tiny", "warmup.steps=800"),
    "grpo.groups_per_step=12",
    "trainer.minibatches=1",
    "evaluation.every=10",
    "evaluation.num_tasks=192",
    "evaluation.extra_splits=[]",
    "logging.trajectories=none",
]
ARMS = {"corrected": [], "uncorrected": ["grpo.loss={name: simple_grpo, options: {beta: 0.0}}"]}
PICTURE = "off_policy.png"
Cells = dict[tuple[str, int], list[Path]]
"""Runs by arm and degree of asynchrony, one for each seed."""


def scores(folder: Path) -> list[float]:
    """Return the held-out scores of a run."""
    return score_curve(metrics(folder), "eval").y


def draw(cells: Cells, degrees: list[int], path: Path) -> None:
    """Plot held-out scores over steps, one panel for each arm: thin lines are seeds, thick lines their means."""
    with figure(path, len(ARMS)) as panels:
        for panel, arm in zip(panels, ARMS, strict=True):
            panel.set_title(arm)
            for color, staleness in zip(COLORS, degrees, strict=False):
                runs = cells[arm, staleness]
                steps, lines = score_curve(metrics(runs[0]), "eval").x, [scores(folder) for folder in runs]
                for line in lines:
                    panel.plot(steps, line, color=color, alpha=0.2, linewidth=1)
                mean = [statistics.fmean(values) for values in zip(*lines, strict=True)]
                panel.plot(steps, mean, color=color, marker="o", linewidth=2, label=f"at most {staleness} off-policy")


def row(cells: Cells, staleness: int) -> list[object]:
    """Return scores by arm over seeds, and oldest trained token and discarded tokens over arms."""
    runs = [cells[arm, staleness] for arm in ARMS]
    ends = [spread([scores(folder)[-1] for folder in each]) for each in runs]
    summaries = [summary(folder) for each in runs for folder in each]
    oldest = max(each["max_staleness"] for each in summaries)
    discarded = sum(each["tokens_discarded_stale"] for each in summaries)
    return [staleness, spread([scores(folder)[0] for folder in runs[0]]), *ends, oldest, discarded]


def measure(args: argparse.Namespace) -> list[str]:
    cells: Cells = {}
    for seed in args.seeds:  # grouped by seed, because runs of one seed share the warmed-up model
        for staleness in args.staleness:
            for arm, keys in ARMS.items():
                same = arm if staleness else next(iter(ARMS))
                settings = [f"seed={seed}", f"grpo.max_off_policy_steps={staleness}", f"grpo.steps={args.steps}"]
                folder = train(f"off-policy-{same}-{staleness}-{seed}", *RECIPE, *keys, *settings)
                cells.setdefault((arm, staleness), []).append(folder)
    draw(cells, args.staleness, Path("docs") / PICTURE)
    columns = ["off-policy", "start", *(f"{arm}, end" for arm in ARMS), "oldest token", "tokens discarded"]
    picture = f"![held-out score over steps by degree of asynchrony, corrected and not]({PICTURE})"
    return [*table(columns, [row(cells, staleness) for staleness in args.staleness]), "", picture]


if __name__ == "__main__":
    main("Learning off-policy", measure, staleness=[0, 1, 2, 4, 8], seeds=[0, 1, 2], steps=20)
