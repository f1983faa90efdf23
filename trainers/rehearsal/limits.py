"""Disk and memory of a rehearsed run: at which step they run out."""

from __future__ import annotations

from collections.abc import Iterator

from forge_env.config.recipe import RunConfig
from forge_env.job.needs import ModelMemory
from forge_env.job.plan import Plan
from forge_env.run.rehearsal import Finding
from trainers.plan.memory import GIB
from trainers.rehearsal.hosts import Host, memory_by_host
from trainers.rehearsal.stage import Performance

RECORDED = 9.3
"""Bytes of a recorded trajectory for each of its tokens (docs/benchmarks.md, Trajectories)."""
LOGS_GB = 0.3
"""GiB of a run folder's other files, as in the checks before a start (`forge_env.run.preflight`)."""
CALL = 1000
"""Bytes that a worker keeps for each turn until its process ends (docs/scale.md, Calls)."""
OPEN, PER_TOKEN = 80_000, 12
"""Bytes of a worker for each open episode, and for each of its tokens (docs/scale.md)."""
IN_BUFFER = 10
"""Bytes of the buffer for each token (docs/scale.md)."""


def _tokens(performance: Performance) -> float:
    """Tokens of the episodes of a step."""
    return (performance.prompt + performance.sampled) / max(performance.steps, 1)


def disk(config: RunConfig, performance: Performance, model: ModelMemory, host: Host) -> Iterator[Finding]:
    """Find the step at which the disk of the run folder is full."""
    section = config.checkpoint
    window = config.grpo.max_off_policy_steps + 1
    each = model.saved_gb + window * _tokens(performance) * IN_BUFFER / GIB
    kept = section.keep + section.keep_best + 1
    fixed = LOGS_GB + kept * each
    growth = _tokens(performance) * RECORDED / GIB if config.logging.trajectories == "all" else 0.0
    if fixed > host.disk_gb:
        step = _first_full(config, host.disk_gb / each, performance)
        yield Finding(
            "checkpoint.keep",
            f"the disk is full at step {step}: {kept} checkpoints of {each:,.1f} GiB (checkpoint.keep={section.keep}, "
            f"keep_best={section.keep_best}, and the one being written) don't fit into {host.disk_gb:,.0f} GiB",
            f"use a disk of {fixed:,.0f} GiB or more, or keep fewer: checkpoint.keep, checkpoint.keep_best",
        )
    elif growth and (step := int((host.disk_gb - fixed) / growth)) < config.grpo.steps:
        yield Finding(
            "logging.trajectories",
            f"the disk is full at step {step}: each step records {growth:,.2f} GiB of trajectories, and "
            f"{host.disk_gb - fixed:,.0f} GiB are left by the checkpoints",
            f"use logging.trajectories=eval, or a disk of {fixed + growth * config.grpo.steps:,.0f} GiB",
        )


def _first_full(config: RunConfig, fit: float, performance: Performance) -> int:
    """Step at whose checkpoint the disk is full, if it has room for `fit` checkpoints."""
    steps = [step for step, _ in performance.saves]
    every = steps[0] if steps else config.checkpoint.every or config.evaluation.every or config.grpo.steps
    return min(config.grpo.steps, (int(fit) + 1) * every)


def memory(config: RunConfig, performance: Performance, plan: Plan, host: Host, count: int) -> Iterator[Finding]:
    """Find the step at which a host's memory is used up: workers keep some bytes of every turn until they end."""
    used = memory_by_host(config, plan, count)
    places = [plan.places[f"rollouts{number}"].hosts[0] for number in range(config.rollouts.workers)]
    grpo = config.grpo
    window = grpo.max_off_policy_steps + 1
    episodes = grpo.groups_per_step * grpo.group_size * window
    each = (episodes * OPEN + window * _tokens(performance) * PER_TOKEN) / config.rollouts.workers / GIB
    for number in places:
        used[number] += each
    used[plan.places["buffer"].hosts[0]] += window * _tokens(performance) * IN_BUFFER / GIB
    growth = performance.turns * CALL / config.rollouts.workers / GIB
    for number in range(count):
        left, grows = host.memory_gb - config.watchdog.free_memory_gb - used[number], growth * places.count(number)
        step = 0 if left <= 0 else int(left / grows) if grows else grpo.steps
        if step < grpo.steps:
            yield Finding(
                "rollouts.workers",
                f"the memory of host {number} runs out at step {step}: the run takes {used[number]:,.1f} of "
                f"{host.memory_gb:,.0f} GiB from its start, and its workers keep {grows * 1024:,.1f} MiB of each step",
                "let workers run on more hosts (rollouts.workers, job.place.rollouts), or stop the run before with "
                "Ctrl-C and --resume it: new processes begin without them",
            )
            return
