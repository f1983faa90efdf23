"""Rehearse a recipe: its own checks, its hosts, and a simulation of its loops (docs/rehearsal.md)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from forge_env import machine
from forge_env.config.recipe import RunConfig
from forge_env.environment.sandbox_environment import SandboxEnvironment
from forge_env.errors import ForgeError, UsageError
from forge_env.job.needs import model_memory, needed_gpus
from forge_env.registry import environment_class, make_config
from forge_env.run.rehearsal import Conditions, Finding, Rehearsal
from trainers.plan.forecast import Forecast
from trainers.plan.hardware import Cluster, parse_cluster
from trainers.plan.speed import PROMPT, Workload
from trainers.rehearsal import limits
from trainers.rehearsal.episodes import Drawn, Recorded, read_episodes
from trainers.rehearsal.findings import CUT, Critic, check, refused
from trainers.rehearsal.hosts import Host, deaths, placed, resumes
from trainers.rehearsal.real import rehearse_stack
from trainers.rehearsal.recorded import Fit, Record, fit
from trainers.rehearsal.stage import Performance, Scene, perform
from trainers.rehearsal.timing import Timing
from trainers.rehearsal.workers import Sandboxed

SPREAD = 1.5
"""95th percentile of the sampled tokens of an episode relative to the median, if neither is given; assumed."""
TOOL_S = 1.0
"""Seconds of a turn in an environment with sandboxes, if they are not given; assumed."""
MOST_TURNS = 4
"""Turns of an episode, if they are not given and the environment allows as many; assumed."""
STEPS = 24
"""Steps that are simulated by default."""
GPU_HOST = "8xH100"
CPUS, MEMORY_GB, DISK_GB = 64, 1024.0, 4096.0
"""Processors, GiB of memory and of disk space of a GPU host, if they are not given; assumed."""


@dataclass(frozen=True, slots=True)
class Cast:
    """What a rehearsal assumes of the episodes.

    Attributes:
        episodes: their lengths.
        work: the plan's workload with the same means.
        sandboxed: when an episode holds a sandbox.
        assumed: the assumptions, as sentences.
    """

    episodes: Drawn | Recorded
    work: Workload
    sandboxed: Sandboxed
    assumed: list[str]


def rehearse(config: RunConfig, conditions: Conditions, show: Callable[[str], object]) -> Rehearsal:
    """Rehearse a recipe.

    Args:
        config: the recipe.
        conditions: what is assumed, and whether to run the real stack.
        show: prints a line about a stage on the stack.

    Raises:
        UsageError: its method can't be rehearsed, or a condition is wrong.
    """
    if conditions.stack:
        return rehearse_stack(config, conditions, show)
    if config.method != "grpo":
        raise UsageError(
            f"method={config.method} can't be rehearsed: only grpo's loops are simulated",
            fix="--stack runs it with a small model; forge-env train FILE --plan forecasts its memory and time",
        )
    host, assumed = host_of(config, conditions)
    findings = list(check(config))
    title = f"{config.model.path} on {conditions.hosts} host{'s' * (conditions.hosts != 1)}, each with {host}"
    try:
        cast = cast_of(config, conditions)
        cluster = Cluster(max(1, host.cluster.count * conditions.hosts), host.cluster.gpu)
        forecast = Forecast(config, cast.work, cluster)
    except ForgeError as error:
        if conditions.like is not None and isinstance(error, UsageError) and error.message.startswith("--like"):
            raise
        findings.append(refused(error, "model.path"))
        return Rehearsal(title, _once(findings), assumed=assumed, notes=["nothing was simulated: see the findings"])
    assumed += cast.assumed
    findings += [_shortage(problem, conditions) for problem in forecast.problems]
    findings += _hosts(config, host, conditions.hosts, cast.work)
    scene = scene_of(config, conditions, host, cast, forecast)
    if conditions.like is not None:
        fitted = fit_like(conditions.like, conditions, host)
        scene = replace(scene, timing=fitted.apply(scene.timing))
        assumed.append(
            f"generation takes {fitted.generation:.3g} and training {fitted.training:.3g} times as long as planned, as "
            f"in {conditions.like}; a rehearsal of that run's recipe is off by {100 * fitted.off:.0f} points at most "
            f"({fitted.where})"
        )
    performance = perform(scene)
    findings += Critic(scene, performance).findings()
    if performance.step_s:
        findings += _limits(config, performance, host, conditions.hosts)
    return Rehearsal(
        f"{title}: {performance.steps} of {config.grpo.steps} steps",
        _once(findings),
        performance.step_s or None,
        performance.shares(),
        _figures(performance),
        forecast.step.seconds,
        assumed,
    )


def scene_of(config: RunConfig, conditions: Conditions, host: Host, cast: Cast, forecast: Forecast) -> Scene:
    """What is simulated of a recipe."""
    timing = Timing.of(forecast, model_memory(config), conditions.disk_speed, host.cpus)
    steps = min(conditions.steps or STEPS, config.grpo.steps)
    return Scene(config, timing, cast.episodes, cast.sandboxed, host.cpus, steps, conditions.real_s / 6)


def fit_like(folder: Path, conditions: Conditions, host: Host) -> Fit:
    """Factors of the recorded run in `folder`.

    Raises:
        UsageError: it can't be used.
    """
    record = Record.read(folder)
    cast = cast_of(record.config, conditions)
    cluster = Cluster(max(1, host.cluster.count * conditions.hosts), host.cluster.gpu)
    return fit(record, scene_of(record.config, conditions, host, cast, Forecast(record.config, cast.work, cluster)))


def _once(findings: list[Finding]) -> list[Finding]:
    """Findings without repetitions."""
    return list(dict.fromkeys(findings))


def _shortage(problem: str, conditions: Conditions) -> Finding:
    """Convert a problem of the plan to a finding."""
    if problem.startswith("it needs"):
        return Finding(
            "generator.num_replicas",
            problem,
            f"use more hosts (--hosts {conditions.hosts + 1}), or lower generator.num_replicas or trainer.procs",
        )
    role = problem.partition(":")[0]
    fixes = {
        "trainer": (
            "trainer.procs",
            "use more trainer.procs, trainer.activation_checkpoint=full, or fewer trainer.microbatch_tokens",
        ),
        "generator": ("generator.procs", "use more generator.procs"),
        "reference": ("grpo.reference.procs", "use more grpo.reference.procs"),
    }
    key, fix = fixes[role]
    return Finding(key, problem, fix)


def _hosts(config: RunConfig, host: Host, count: int, work: Workload) -> Iterator[Finding]:
    """Place the run on its hosts, let each of them die, and resume on one less."""
    try:
        placed(config, host, count)
    except UsageError as error:
        yield refused(error, "trainer.hosts")
        return
    if count > 1:
        yield from deaths(config, host, count)
        yield from resumes(config, host, count, work)


def _limits(config: RunConfig, performance: Performance, host: Host, count: int) -> Iterator[Finding]:
    yield from limits.disk(config, performance, model_memory(config), host)
    try:
        plan = placed(config, host, count)
    except UsageError:  # reported already
        return
    yield from limits.memory(config, performance, plan, host, count)


def _figures(performance: Performance) -> dict[str, float]:
    cuts = performance.cuts
    return {
        "mean staleness of the trained groups, steps": performance.staleness,
        "replies cut by grpo.max_tokens_per_turn, %": 100 * cuts.by_turn / max(cuts.replies, 1),
        "episodes cut by model.max_length, %": 100 * cuts.by_context / max(cuts.episodes, 1),
        "episodes later than grpo.group_timeout_s, %": 100 * cuts.late / max(cuts.episodes + cuts.late, 1),
        "longest time without progress, s": performance.quiet_s,
        "turns of a step": performance.turns,
    }


def host_of(config: RunConfig, conditions: Conditions) -> tuple[Host, list[str]]:
    """The resources of each host, and what was assumed of them."""
    if conditions.hosts < 1:
        raise UsageError(f"--hosts {conditions.hosts}: there must be at least one")
    on_gpus = needed_gpus(config) > 0 or conditions.gpus is not None
    cluster = parse_cluster(conditions.gpus or GPU_HOST)
    if not on_gpus:
        cluster = replace(cluster, count=0)
    defaults: dict[str, Callable[[], float]] = {
        "cpus": (lambda: CPUS) if on_gpus else machine.usable_cpus,
        "memory_gb": (lambda: MEMORY_GB) if on_gpus else machine.free_memory_gb,
        "disk_gb": (lambda: DISK_GB) if on_gpus else lambda: machine.free_disk_gb(Path(config.output_dir)),
    }
    assumed, values = [], {}
    for name, default in defaults.items():
        given = getattr(conditions, name)
        values[name] = default() if given is None else given
        if given is None:
            flag = {"cpus": "cpus", "memory_gb": "memory", "disk_gb": "disk"}[name]
            source = "" if on_gpus else ", as on this machine"
            assumed.append(f"each host has {_amount(name, values[name])}{source}: --{flag} N")
    return Host(cluster, int(values["cpus"]), values["memory_gb"], values["disk_gb"]), assumed


def _amount(name: str, value: float) -> str:
    what = {"cpus": "processors", "memory_gb": "GiB of memory", "disk_gb": "GiB of disk"}[name]
    return f"{value:,.0f} {what}"


def cast_of(config: RunConfig, conditions: Conditions) -> Cast:
    """The episodes of a rehearsal.

    Raises:
        UsageError: a length is out of range, or the recorded run can't be used.
    """
    cls = environment_class(config.environment.name)
    sandboxed: Sandboxed = "no"
    if issubclass(cls, SandboxEnvironment):
        sandboxed = "episode"
    elif any("sandboxes" in code.co_names for code in _codes(cls)):
        sandboxed = "turn"
    if conditions.like is not None:
        return _recorded(conditions.like, config, sandboxed)
    most = getattr(make_config(config.environment.name, cls, config.environment.options), "max_turns", 1)
    turns = conditions.turns or min(MOST_TURNS, most)
    tool_s = conditions.tool_s if conditions.tool_s is not None else TOOL_S * (sandboxed != "no")
    longest = config.model.max_length
    prompt = conditions.prompt or min(PROMPT, longest // 2)
    reply = conditions.reply or max(1, min(config.grpo.max_tokens_per_turn * turns, longest - prompt) // 2)
    p95 = conditions.reply_p95 or round(SPREAD * reply)
    if p95 < reply or min(prompt, reply, turns) < 1 or tool_s < 0:
        raise UsageError(
            f"episodes of {prompt} + {reply} tokens (95 % below {p95}) in {turns} turns of {tool_s:g} s",
            fix="lengths and turns are at least 1, times at least 0, and the 95th percentile at least the median",
        )
    episodes = Drawn(config.grpo.group_size, prompt, reply, p95, turns, tool_s, config.seed)
    return Cast(episodes, _work(config, prompt, reply), sandboxed, [*_assumed(conditions, episodes)])


def _work(config: RunConfig, prompt: int, reply: int) -> Workload:
    """The plan's workload, with lengths that fit into the context."""
    longest = config.model.max_length
    prompt = max(1, min(prompt, longest // 2))
    return Workload.of(config, prompt, max(1, min(reply, longest - prompt)))


def _assumed(conditions: Conditions, episodes: Drawn) -> Iterator[str]:
    if conditions.reply is None:
        yield f"half of the episodes sample more than {episodes.reply:,} tokens, 5 % than {episodes.p95:,}: --reply N:N"
    elif conditions.reply_p95 is None:
        yield f"5 % of the episodes sample more than {episodes.p95:,} tokens: --reply MEDIAN:P95"
    if conditions.prompt is None:
        yield f"the first prompt has {episodes.prompt} tokens: --prompt N"
    if conditions.turns is None:
        yield f"episodes have {episodes.turns} turn{'s' * (episodes.turns != 1)}: --turns N"
    if conditions.tool_s is None:
        yield f"the environment takes {episodes.tool_s:g} s for each turn: --tool-s X"


def _recorded(folder: Path, config: RunConfig, sandboxed: Sandboxed) -> Cast:
    recorded = read_episodes(folder, config)
    text = f"episodes are as long as the {sum(map(len, recorded.groups)):,} recorded in {folder}"
    if recorded.cut >= CUT:
        text += f", where a limit cut {100 * recorded.cut:.0f} % of the replies: their true lengths are unknown"
    return Cast(recorded, _work(config, *recorded.mean()), sandboxed, [text])


def _codes(cls: type) -> Iterator[Any]:
    """Code of the methods that an environment defines itself."""
    for base in cls.__mro__:
        if not base.__module__.startswith("forge_env."):
            for member in vars(base).values():
                if (code := getattr(member, "__code__", None)) is not None:
                    yield code
