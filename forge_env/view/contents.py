"""Values for the templates of a run's pages, which the server and reports share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from forge_env.evaluation.tables import exceptions
from forge_env.figures import count, duration, number
from forge_env.reading import UnsafeFileError, open_file
from forge_env.run.contract import CLAUSES, in_a_sentence
from forge_env.view import answers, evaluations, text, timeline
from forge_env.view.charts import Chart, charts
from forge_env.view.digest import digest_of
from forge_env.view.failures import failures
from forge_env.view.records import UnreadableError
from forge_env.view.runs import RunView

NAV = (
    ("", "Overview"),
    ("trajectories", "Trajectories"),
    ("time", "Time"),
    ("evaluations", "Held-out scores"),
    ("recipe", "Recipe"),
    ("log", "Log"),
)
EVALUATION_NAV = (("", "Overview"), ("trajectories", "Trajectories"), ("recipe", "Recipe"), ("log", "Log"))
LOG_BYTES = 200_000


def nav_of(run: RunView) -> tuple[tuple[str, str], ...]:
    """Return name and label of each page of a run."""
    return EVALUATION_NAV if run.is_evaluation else NAV


def overview(run: RunView, around: int | None = None) -> dict[str, Any]:
    """The four answers and the curves of a training run.

    Args:
        around: compare the episodes just before and just after this step; None: the first and the last fifth.
    """
    found, figures = digest_of(run, around), run.figures()
    parts = [
        figures.environment,
        figures.model,
        f"seed {figures.seed}" if figures.seed is not None else "",
        f"{figures.steps} steps" + (f" in {duration(figures.wall_s, fine=True)}" if figures.wall_s else ""),
        f"{count(run.queries.count())} trajectories",
        f"{number(figures.tokens_per_s)} tokens/s" if figures.tokens_per_s else "",
    ]
    return {
        "run": run,
        "title": run.name,
        "found": found,
        "around": around,
        "subtitle": " · ".join(filter(None, parts)),
        "error": str(run.summary.get("error") or "")[: text.SHOWN],
        "progress": run.index.progress(),
        "trust": in_a_sentence(run.contract),
        "clauses": CLAUSES,
        "facts": [*facts(run.summary)],
    }


def evaluation(run: RunView) -> dict[str, Any]:
    """The results of an evaluation."""
    config, known, parts = run.config, run.scores, evaluations.parts_of(run)
    errors = run.summary.get("request_errors")
    notes = []
    if isinstance(errors, dict) and errors:
        listed = ", ".join(f"{number} {name}" for name, number in errors.items())
        notes.append(f"failed requests, retries included: {listed}")
    notes += [f"{item.get('label')}: the first failure: {item['first_bug']}" for item in known if item.get("bugs")]
    return {
        "run": run,
        "title": run.name,
        "model": str(config.get("model") or ""),
        "score_name": str(config.get("score") or "reward"),
        "confidence": evaluations.confidence_of(run),
        "parts": parts,
        "planned": sum(item.get("planned", 0) for item in known if isinstance(item.get("planned"), int)),
        "played": run.queries.count(),
        "exceptions": {str(item.get("label")): exceptions(item) for item in known},
        "notes": notes,
        "progress": run.index.progress(),
        "failures": {part.name: failures(run, "", part.name) for part in parts},
        "limits": {part.name: answers.sample_limit(run.queries, part.name) for part in parts},
        "facts": [*facts(run.summary)],
    }


def held_out(run: RunView) -> dict[str, Any]:
    """The held-out scores of a training run: by split and step, by tag and difficulty."""
    return {
        "run": run,
        "title": f"Held-out scores of {run.name}",
        "splits": evaluations.held_out(run),
        "progress": run.index.progress(),
    }


def time(run: RunView) -> dict[str, Any]:
    """The time account and the timeline of a training run."""
    limit, recorded = answers.limit(run), run.timeline
    return {
        "run": run,
        "title": f"Time of {run.name}",
        "limit": limit,
        "bars": timeline.bars(limit.accounts),
        "phases": recorded.phases(),
        "has_timeline": bool(recorded.spans),
        "damaged": recorded.damaged,
    }


def recipe(run: RunView) -> dict[str, Any]:
    """The definition of the reward, and the resolved recipe.

    Raises:
        UnreadableError: config.yaml can't be read.
    """
    sub, content = part_of(run.root / "config.yaml", last=False)
    return {
        "run": run,
        "title": "Recipe",
        "sub": sub,
        "text": content,
        "reward": _reward_definition(run),
        "environment": run.environment,
        "facts": [*facts(run.summary)],
    }


def charts_of(run: RunView) -> list[Chart]:
    """Return the charts of a run: standard curves, histograms, other metrics."""
    shown = charts({run.name: run.metrics}, run.scored_by)
    split = next((split for split, chart in enumerate(shown) if not chart.known), len(shown))
    return [*shown[:split], *run.histograms(), *shown[split:]]


def facts(summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield names and values of the run's settings, machine and totals."""
    bound = summary.get("max_off_policy_steps")
    known = {
        "environment": summary.get("environment"),
        "model": summary.get("model"),
        "seed": summary.get("seed"),
        "training steps": summary.get("steps"),
        "started": summary.get("started"),
        "finished": summary.get("finished"),
        "wall time": duration(wall_s) if isinstance(wall_s := summary.get("wall_s"), int | float) and wall_s else None,
        "sandbox engine": summary.get("engine"),
        "tokens generated": number(tokens) if isinstance(tokens := summary.get("tokens_generated"), int) else None,
        "episodes": number(played) if isinstance(played := summary.get("episodes"), int) else None,
        "episodes lost to environment bugs": summary.get("episodes_bugs") or None,
        f"largest staleness (bound {bound})": summary.get("max_staleness") if bound is not None else None,
    }
    yield from ((name, str(value)) for name, value in known.items() if value not in (None, ""))
    if isinstance(versions := summary.get("versions"), dict):
        yield "versions", ", ".join(f"{name} {version}" for name, version in versions.items())
    if isinstance(machine := summary.get("machine"), dict):
        gpus = listed if isinstance(listed := machine.get("gpus"), list) and listed else ["no GPU"]
        yield (
            "machine",
            f"{machine.get('processor')}, {machine.get('cpus')} CPUs, {machine.get('memory_gb')} GiB; "
            + (f"{', '.join(map(str, gpus))}; {machine.get('system')}"),
        )


def part_of(path: Path, *, last: bool) -> tuple[str, str]:
    """Read the end or the beginning of a file, and describe its name, size and the part that was read.

    Raises:
        UnreadableError: it can't be read.
    """
    try:
        with open_file(path) as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - LOG_BYTES) if last else 0)
            content = file.read(LOG_BYTES).decode("utf-8", "replace")
    except UnsafeFileError as error:
        raise UnreadableError(str(error)) from error
    except FileNotFoundError:
        return f"This run has no {path.name}.", ""
    except OSError as error:
        raise UnreadableError(f"{path.name} can't be read: {error.strerror}") from error
    cut = f"; the {'last' if last else 'first'} {LOG_BYTES:,}" if size > LOG_BYTES else ""
    return f"{path.name}, {size:,} bytes{cut}", content


def _reward_definition(run: RunView) -> dict[str, Any]:
    """Return the run's record of its reward definition, with highlighted source code; empty if there is none."""
    definition = run.summary.get("reward")
    if not isinstance(definition, dict):
        return {}
    listed = definition.get("functions")
    functions = [item for item in listed if isinstance(item, dict)] if isinstance(listed, list) else []
    return {
        "about": str(definition.get("about") or ""),
        "best": definition.get("max_reward") if isinstance(definition.get("max_reward"), int | float) else None,
        "functions": [
            {
                "name": str(item.get("name")),
                "weight": item.get("weight") if isinstance(item.get("weight"), int | float) else None,
                "source": text.code(str(item.get("source") or "")[: text.SHOWN], "python"),
            }
            for item in functions[:40]
        ],
    }
