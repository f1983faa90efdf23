"""Rehearsals of recipes: what is assumed about hosts and episodes, and what a rehearsal finds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from forge_env.config.recipe import RunConfig
from forge_env.figures import duration
from forge_env.plugins import load_plugin
from forge_env.schema import with_schema

LEAST_SHOWN = 0.005
"""Smallest share of an actor's time that the report shows."""


@dataclass(frozen=True, slots=True)
class Conditions:
    """Hosts and episodes that a rehearsal assumes; None: a default that the report states.

    Attributes:
        gpus: GPUs of a host, such as 8xH100.
        memory_gb: main memory of a host, GiB.
        disk_gb: free space for the run folder, GiB.
        disk_speed: bytes per second that the run folder's disk writes.
        prompt: tokens of an episode's first prompt.
        reply: sampled tokens of an episode: the median.
        reply_p95: sampled tokens that 95 % of the episodes don't exceed.
        tool_s: seconds of a turn in the environment.
        like: folder of a run whose lengths and times are used.
        real_s: seconds that the simulations may take on this machine.
        stack: run the real stack with a small model instead of a simulation.
        name: name of the recipe, for the folder of a rehearsal on the stack.
    """

    hosts: int = 1
    gpus: str | None = None
    cpus: int | None = None
    memory_gb: float | None = None
    disk_gb: float | None = None
    disk_speed: float = 1e9
    prompt: int | None = None
    reply: int | None = None
    reply_p95: int | None = None
    turns: int | None = None
    tool_s: float | None = None
    like: Path | None = None
    steps: int | None = None
    real_s: float = 180.0
    stack: bool = False
    name: str = ""


@dataclass(frozen=True, slots=True)
class Finding:
    """A fault of a recipe."""

    key: str
    text: str
    fix: str


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """Result of a rehearsal.

    Attributes:
        findings: faults, the gravest first.
        step_s: forecast seconds of a training step; None if nothing was simulated.
        shares: actor -> activity -> share of its time.
        plan_step_s: seconds of a step by `forge-env train --plan`.
        notes: what was not rehearsed, and why.
        stages: stages on the real stack, with their seconds, figures and errors.
    """

    title: str
    findings: Sequence[Finding]
    step_s: float | None = None
    shares: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    figures: Mapping[str, float] = field(default_factory=dict)
    plan_step_s: float | None = None
    assumed: Sequence[str] = ()
    notes: Sequence[str] = ()
    stages: Sequence[Mapping[str, Any]] = ()

    def as_json(self) -> dict[str, Any]:
        """Return the result as JSON values."""
        return with_schema(asdict(self))

    def lines(self) -> Iterator[str]:
        """Format the result for the terminal."""
        if not self.stages:  # a rehearsal on the stack has shown its title, stages and changes already
            yield self.title
        if self.step_s is not None:
            yield ""
            text = f"a step takes {duration(self.step_s, fine=True)}"
            if self.plan_step_s is not None:
                text += f"; `forge-env train --plan` forecasts {duration(self.plan_step_s, fine=True)}"
            yield text
            for actor, shares in self.shares.items():
                parts = sorted(shares.items(), key=lambda item: -item[1])
                shown = [f"{name} {100 * share:.0f} %" for name, share in parts if share >= LEAST_SHOWN]
                yield f"  {actor:<10} {', '.join(shown)}"
            yield from (f"  {name}: {value:,.4g}" for name, value in self.figures.items())
        yield ""
        yield from (f"-- {text}" for text in self.notes)
        if not self.stages:
            yield from (f"-- assumed: {text}" for text in self.assumed)
        for finding in self.findings:
            yield f"!! {finding.key}: {finding.text}"
            yield f"   -> {finding.fix}"
        if not self.findings:
            yield "ok nothing was found"


def rehearse(config: RunConfig, conditions: Conditions, show: Callable[[str], object] = lambda line: None) -> Rehearsal:
    """Rehearse a recipe with the installed training packages.

    Args:
        config: the recipe.
        conditions: what to assume.
        show: prints a line about a stage on the stack.

    Raises:
        NotRegisteredError: they are not installed.
        UsageError: the recipe's method, or the conditions, can't be rehearsed.
    """
    play: Callable[[RunConfig, Conditions, Callable[[str], object]], Rehearsal] = load_plugin(
        "forge_env.forecasts", "rehearse"
    )
    return play(config, conditions, show)
