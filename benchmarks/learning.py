"""Plot and tabulate learning: a recipe's held-out score from start to end, one run for each seed.

python -m benchmarks learning --seeds 1 2 3             train, then plot
python -m benchmarks learning --runs runs/a runs/b      plot existing runs
python -m benchmarks learning --recipe grpo/math_cpu --out docs/curves_grpo_math.png
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.frame import metrics, summary, table, train
from forge_env.display.curves import Curve, curve, score_curve

COLORS = ("#2563eb", "#d97706", "#059669", "#9333ea", "#dc2626", "#111827")


@contextmanager
def figure(path: Path, panels: int = 1) -> Iterator[list[Any]]:
    """Save a picture with the axes that the block draws on, side by side: training steps and held-out scores."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    picture, axes = pyplot.subplots(1, panels, figsize=(3 + 4.5 * panels, 4.5), dpi=150, sharey=True, squeeze=False)
    yield list(axes[0])
    for each in axes[0]:
        each.set_xlabel("training step")
        each.grid(alpha=0.25)
    axes[0][0].set_ylabel("held-out score")
    axes[0][0].legend(loc="lower right", frameon=False)
    picture.tight_layout()
    picture.savefig(path)


def draw(folders: list[Path], path: Path) -> None:
    """Plot held-out scores with their standard errors over faint training rewards, one colour for each seed."""
    with figure(path) as (axes,):
        axes.set_ylim(0, 1)
        for color, folder in zip(COLORS, folders, strict=False):
            rows, label = metrics(folder), f"seed {summary(folder)['seed']}"
            reward, heldout = curve(rows, "training reward", "reward/mean"), score_curve(rows, "eval")
            axes.plot(reward.x, smooth(reward), color=color, alpha=0.25, linewidth=1)
            axes.errorbar(heldout.x, heldout.y, heldout.error, color=color, marker="o", capsize=2, label=label)


def smooth(values: Curve) -> list[float]:
    """Return the running mean over the last five values."""
    windows = [values.y[max(0, end - 5) : end] for end in range(1, len(values.y) + 1)]
    return [sum(window) / len(window) for window in windows]


def rows_of(folders: list[Path]) -> list[str]:
    """Return a table with one row for each run; held-out families only if they were evaluated."""
    summaries = [summary(folder) for folder in folders]
    scores = {"held-out start": "heldout_start", "end": "heldout_end"}
    if any("heldout_unseen_start" in each for each in summaries):
        scores |= {"held-out families start": "heldout_unseen_start", "their end": "heldout_unseen_end"}
    rows = []
    for each in summaries:
        cells = [f"{each[key]:.3f}" for key in scores.values()] + [f"{each['heldout']['eval']['stderr']:.3f}"]
        seconds, engine = f"{each['wall_s']:.0f}", each["engine"] or "none"
        rows.append([each["seed"], *cells, each["steps"], seconds, engine, each["max_staleness"]])
    return table(["seed", *scores, "standard error", "steps", "wall s", "engine", "max staleness"], rows)


def main() -> None:
    """Train or read runs, plot them and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="*", default=["0", "1", "2", "3", "4"])
    parser.add_argument("--runs", type=Path, nargs="*", default=[])
    parser.add_argument("--recipe", default="coding_rlvr.yaml")
    parser.add_argument("--out", type=Path, default=Path("docs/curves.png"))
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    name = Path(args.recipe).with_suffix("").as_posix().replace("/", "-")
    folders = args.runs or [
        train(f"learning-{name}-{seed}", f"seed={seed}", *args.overrides, recipe=args.recipe) for seed in args.seeds
    ]
    draw(folders, args.out)
    print("\n".join(rows_of(folders)))


if __name__ == "__main__":
    main()
