"""Measure the cost of staleness: learning at 0 to 8 steps off-policy, with and without correction, over seeds.

python -m benchmarks off_policy --seeds 0 1 2      train missing runs under runs/, then plot

"Corrected" is the default recipe's loss with the clipped importance ratio of each token to the policy version that
sampled it. "Uncorrected" is the plain policy gradient, with the ratio fixed at 1. A step is one update of a batch half
the size of the default recipe's, so that at 0 steps off-policy the ratio is 1 and one run serves for both. The warm-up
is shorter, which leaves more to learn. Runs that have succeeded are not repeated, so the benchmark can be interrupted.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.report import has_succeeded, record, spread, table
from forge_env.display.curves import merge_rows, score_curve
from forge_env.run.metrics import read_metrics

RECIPE = [
    *("model.path=tiny", "warmup.steps=800"),
    "grpo.groups_per_step=12",
    "trainer.minibatches=1",
    "evaluation.num_tasks=192",
    "evaluation.extra_splits=[]",
    "logging.trajectories=none",
]
ARMS = {
    "corrected": [],
    "uncorrected": ["grpo.loss={name: simple_grpo, options: {beta: 0.0}}"],
}
COLORS = ("#111827", "#2563eb", "#059669", "#d97706", "#dc2626", "#9333ea")


@dataclass(frozen=True)
class Cell:
    """Results of one arm at one degree of asynchrony, over its seeds."""

    steps: list[float]
    scores: list[list[float]]
    """Held-out scores, [seeds][evaluations]."""
    oldest: int
    discarded: int
    wall_s: list[float]

    @property
    def mean(self) -> list[float]:
        """Mean score over seeds for each evaluation."""
        return [statistics.fmean(values) for values in zip(*self.scores, strict=True)]


def train(arm: str, staleness: int, seed: int, steps: int, every: int) -> Path:
    """Return the folder of a run; train it first unless it has succeeded before."""
    folder = Path("runs") / f"off-policy-{arm}-{staleness}-{seed}"
    if not has_succeeded(folder):
        shutil.rmtree(folder, ignore_errors=True)
        settings = [f"seed={seed}", f"grpo.max_off_policy_steps={staleness}", f"grpo.steps={steps}"]
        overrides = [*RECIPE, *ARMS[arm], *settings, f"evaluation.every={every}"]
        command = [sys.executable, "-m", "forge_env", "train", "coding_rlvr.yaml", "--name", folder.name, *overrides]
        subprocess.run(command, check=True)
    return folder


def read(folders: Sequence[Path]) -> Cell:
    """Read the runs of one cell, one for each seed."""
    curves = [score_curve(merge_rows(read_metrics(folder / "metrics.jsonl")), "eval") for folder in folders]
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in folders]
    return Cell(
        curves[0].x,
        [curve.y for curve in curves],
        max(summary["max_staleness"] for summary in summaries),
        sum(summary["tokens_discarded_stale"] for summary in summaries),
        [summary["wall_s"] for summary in summaries],
    )


def draw(cells: dict[tuple[str, int], Cell], path: Path) -> None:
    """Plot held-out scores over steps, one panel for each arm: thin lines are seeds, thick lines their means."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(ARMS), figsize=(11, 4.5), dpi=150, sharey=True)
    degrees = sorted({staleness for _, staleness in cells})
    for panel, arm in zip(panels, ARMS, strict=True):
        for color, staleness in zip(COLORS, degrees, strict=False):
            cell = cells[arm, staleness]
            for scores in cell.scores:
                panel.plot(cell.steps, scores, color=color, alpha=0.2, linewidth=1)
            panel.plot(cell.steps, cell.mean, color=color, marker="o", linewidth=2, label=f"{staleness} steps")
        panel.set_title(arm)
        panel.set_xlabel("training step")
        panel.grid(alpha=0.25)
    panels[0].set_ylabel("held-out pass@1, temperature 1")
    panels[0].legend(title="off-policy by at most", frameon=False, loc="lower right")
    figure.tight_layout()
    figure.savefig(path)


def rows_of(cells: dict[tuple[str, int], Cell]) -> list[list[object]]:
    """Return one row for each degree: scores by arm over seeds, oldest trained token and discarded tokens over arms."""
    rows: list[list[object]] = []
    for staleness in sorted({staleness for _, staleness in cells}):
        pair = [cells[arm, staleness] for arm in ARMS]
        ends = [spread([scores[-1] for scores in cell.scores]) for cell in pair]
        oldest, discarded = max(cell.oldest for cell in pair), sum(cell.discarded for cell in pair)
        rows.append([staleness, spread([scores[0] for scores in pair[0].scores]), *ends, oldest, discarded])
    return rows


def main() -> None:
    """Train missing runs, plot, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--staleness", type=int, nargs="*", default=[0, 1, 2, 4, 8])
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--out", type=Path, default=Path("docs/off_policy.png"))
    args = parser.parse_args()
    folders: dict[tuple[str, int], list[Path]] = {}
    for seed in args.seeds:  # grouped by seed, because runs of one seed share the warmed-up model
        for staleness in args.staleness:
            for arm in ARMS:
                run = train(arm if staleness else next(iter(ARMS)), staleness, seed, args.steps, args.every)
                folders.setdefault((arm, staleness), []).append(run)
    cells = {key: read(runs) for key, runs in folders.items()}
    draw(cells, args.out)
    columns = ["off-policy", "start", *(f"{arm}, end" for arm in ARMS), "oldest token", "tokens discarded"]
    lines = table(columns, rows_of(cells))
    print("\n".join(lines))
    about = (
        f"Held-out pass@1 on 192 tasks, median (range) over seeds {', '.join(map(str, args.seeds))}, after "
        f"{args.steps} steps. ![held-out score over steps by degree of asynchrony, corrected and not]({args.out.name})"
    )
    text = [*lines, "", about]
    record("off_policy", "Learning off-policy", "make bench ARGS=off_policy", text)


if __name__ == "__main__":
    main()
