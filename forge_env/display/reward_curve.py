"""reward_curve.png: training reward and held-out score over steps."""

from __future__ import annotations

from forge_env.display.curves import merge_rows
from forge_env.run.folder import RunFolder
from forge_env.run.metrics import read_metrics


def write_reward_curve(folder: RunFolder) -> bool:
    """Draw the picture; False when there is nothing to draw yet."""
    from forge_env.display.report import reward_curves

    curves = reward_curves(merge_rows(read_metrics(folder.metrics)))
    if not curves:
        return False
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.2), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for index, line in enumerate(curves):
        colour = f"C{index}"
        if any(line.error):
            axes.errorbar(line.x, line.y, line.error, label=line.label, color=colour, marker="o", ms=4, capsize=2)
        else:
            axes.plot(line.x, line.y, label=line.label, color=colour, alpha=0.8, linewidth=1.3)
    values = [y for line in curves for y in line.y]
    if min(values) >= 0.0 and max(values) <= 1.0:
        axes.set_ylim(0.0, 1.0)
    axes.set(xlabel="training step", ylabel="reward", title=folder.name)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    figure.savefig(folder.reward_curve)
    return True
