"""Plot and tabulate learning: a recipe's held-out score from start to end, one run for each seed.

python -m benchmarks.learning --seeds 1 2 3             train, then plot
python -m benchmarks.learning --runs runs/a runs/b      plot existing runs
python -m benchmarks.learning --recipe grpo/math_cpu --out docs/curves_grpo_math.png
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from forge_env.display.curves import Curve, curve, merge_rows, score_curve
from forge_env.run.metrics import read_metrics

COLORS = ("#2563eb", "#d97706", "#059669", "#9333ea", "#dc2626")


def train(seed: int, recipe: str, overrides: list[str]) -> Path:
    """Train the recipe once and return the run's folder."""
    name = f"learning-{Path(recipe).with_suffix('').as_posix().replace('/', '-')}-{seed}"
    command = [sys.executable, "-m", "forge_env", "train", recipe, f"seed={seed}", "--name", name, *overrides]
    subprocess.run(command, check=True)
    return Path("runs") / name


def read(folder: Path) -> dict[str, Any]:
    """Return the summary and curves of a run."""
    rows = merge_rows(read_metrics(folder / "metrics.jsonl"))
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return {
        "summary": summary,
        "heldout": score_curve(rows, "eval"),
        "reward": curve(rows, "training reward", "reward/mean"),
    }


def draw(runs: list[dict[str, Any]], path: Path) -> None:
    """Plot held-out scores with their standard errors over faint training rewards, one colour for each seed."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), dpi=150)
    for color, run in zip(COLORS, runs, strict=False):
        reward, heldout = run["reward"], run["heldout"]
        axes.plot(reward.x, smooth(reward), color=color, alpha=0.25, linewidth=1)
        label = f"seed {run['summary']['seed']}"
        axes.errorbar(heldout.x, heldout.y, heldout.error, color=color, marker="o", capsize=2, label=label)
    axes.set_xlabel("training step")
    axes.set_ylabel("held-out score")
    axes.set_ylim(0, 1)
    axes.grid(alpha=0.25)
    axes.legend(loc="lower right", frameon=False)
    figure.tight_layout()
    figure.savefig(path)


def smooth(values: Curve, width: int = 5) -> list[float]:
    """Return the running mean over the last `width` values."""
    return [
        sum(values.y[max(0, i - width + 1) : i + 1]) / (i + 1 - max(0, i - width + 1)) for i in range(len(values.y))
    ]


def table(runs: list[dict[str, Any]]) -> str:
    """Return a Markdown table with one row for each run; held-out families only if they were evaluated."""
    summaries = [run["summary"] for run in runs]
    scores = {"held-out start": "heldout_start", "end": "heldout_end"}
    if any("heldout_unseen_start" in summary for summary in summaries):
        scores |= {"held-out families start": "heldout_unseen_start", "their end": "heldout_unseen_end"}
    columns = ["seed", *scores, "standard error", "steps", "wall s", "engine", "max staleness"]
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    for s in summaries:
        error = f"{s['heldout']['eval']['stderr']:.3f}"
        cells = [s["seed"], *(f"{s[key]:.3f}" for key in scores.values()), error, s["steps"], f"{s['wall_s']:.0f}"]
        lines.append(
            "| " + " | ".join(str(cell) for cell in [*cells, s["engine"] or "none", s["max_staleness"]]) + " |"
        )
    return "\n".join(lines)


def main() -> None:
    """Train or read runs, plot them and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2, 3, 4])
    parser.add_argument("--runs", type=Path, nargs="*", default=[])
    parser.add_argument("--recipe", default="coding_rlvr.yaml")
    parser.add_argument("--out", type=Path, default=Path("docs/curves.png"))
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    folders = args.runs or [train(seed, args.recipe, args.overrides) for seed in args.seeds]
    runs = [read(folder) for folder in folders]
    draw(runs, args.out)
    print(table(runs))


if __name__ == "__main__":
    main()
