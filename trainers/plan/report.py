"""Text report of a forecast, with the effect of further GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial

from forge_env.config.recipe import RunConfig
from forge_env.figures import duration
from forge_env.job.needs import needed_gpus
from forge_env.run.trainer import Question
from trainers.plan import hardware
from trainers.plan.forecast import Forecast
from trainers.plan.hardware import PER_HOST, Cluster, Constant, parse_cluster
from trainers.plan.memory import GIB, RESERVED_GIB
from trainers.plan.speed import Step, Workload

_seconds = partial(duration, fine=True)
KIND = "H100"
"""Kind of GPU when the command names none."""


def plan(config: RunConfig, question: Question) -> Iterator[str]:
    """Yield the report's lines: placement, memory, time, weight sync, cost, effect of further GPUs, and assumptions."""
    needed = needed_gpus(config)
    cluster = parse_cluster(question.gpus or f"{max(needed, 1)}x{KIND}")
    forecast = Forecast(config, Workload.of(config, question.prompt, question.reply), cluster)
    shape, work = forecast.shape, forecast.work
    devices = f"{needed} of {cluster}" if needed else "processors"
    count = shape.parameters
    size = f"{count / 1e9:.2f} billion" if count > 1e8 else f"{count / 1e6:.2f} million"
    yield f"{shape.name}, {size} parameters, on {devices}"
    yield ""
    yield "placement"
    yield from (f"  {line}" for line in forecast.placement())
    if needed and cluster.count > needed:
        yield f"  {cluster.count - needed} of the {cluster.count} GPUs are idle"
    yield ""
    yield from _memory(forecast)
    yield ""
    yield from _time(forecast)
    yield ""
    yield from _cost(forecast, question)
    if needed and cluster.count > needed and config.rolls_out:
        yield ""
        yield from _wider(config, work, cluster)
    yield ""
    yield "assumed"
    yield from (f"  {line}" for line in _assumed(forecast, question))
    if problems := forecast.problems:
        yield ""
        yield from (f"it will not run: {problem}" for problem in problems)


def _memory(forecast: Forecast) -> Iterator[str]:
    holders = forecast.holders
    parts = list(dict.fromkeys(part for holder in holders for part in holder.memory.parts))
    yield "memory of one process, GiB"
    rows = [["", *(f"{holder.name} x{holder.count}" for holder in holders)]]
    rows += [[part, *(_gib(holder.memory.parts.get(part)) for holder in holders)] for part in parts]
    rows.append(["peak", *(_gib(holder.memory.peak) for holder in holders)])
    rows.append(["there is", *("the host's" if holder.room is None else _gib(holder.room) for holder in holders)])
    yield from _table(rows)


def _time(forecast: Forecast) -> Iterator[str]:
    step, work = forecast.step, forecast.work
    yield f"a step of {work.episodes} episodes, {work.prompt} + {work.reply} tokens each"
    rows = []
    if forecast.config.rolls_out:
        rows.append(["generation", _seconds(step.generation_s), _parts(step.generation)])
    rows.append(["training", _seconds(step.learning_s), _parts(step.learning)])
    rows.append(["step", _seconds(step.seconds), step.why])
    yield from _table(rows)
    rates = [f"{step.tokens / step.seconds:,.0f} tokens/s trained"]
    if step.sampled:
        rate = step.sampled / step.generation_s
        rates.append(f"{rate:,.0f} tokens/s can be sampled, {forecast.batch} at once in an engine")
    yield f"  {'; '.join(rates)}"
    yield f"  bottleneck: {step.bottleneck}"
    if (sync := step.sync) is not None:
        parts = {"copy": sync.copy, "publish": sync.publish, "pull": sync.pull, "load": sync.load}
        yield f"  weight sync: {sync.bytes / 1e9:,.2f} GB, {_seconds(sync.seconds)} ({_parts(parts)})"


def _cost(forecast: Forecast, question: Question) -> Iterator[str]:
    config = forecast.config
    steps = config.grpo.steps if config.rolls_out else config.sft.steps
    hours = forecast.step.seconds * steps / 3600
    line = f"{steps:,} steps: {hours:,.2f} hours"
    if forecast.needed:
        used = hours * forecast.needed
        line += f", {used:,.1f} GPU hours"
        line += f", {used * question.price:,.2f} at {question.price:g} an hour" if question.price else ""
    yield line + ", without start, evaluation and checkpoints"


def _wider(config: RunConfig, work: Workload, cluster: Cluster) -> Iterator[str]:
    """Yield a table of the recipe on more GPUs, with its batch size and with a proportionally larger one."""
    yield f"with {cluster}"
    rows = [
        ["", "GPUs", "trainer.procs", "generator.num_replicas", "episodes a step", "s a step", "tokens/s", "bottleneck"]
    ]
    base = Forecast(config, work, cluster).step
    rows.append(_row("the recipe", config, work, base))
    factor = max(1, cluster.count // needed_gpus(config))
    for times in dict.fromkeys((1, factor)):
        name = "its batch" if times == 1 else f"{times} times its batch"
        larger = replace(work, episodes=work.episodes * times)
        if (fastest := widest(config, larger, cluster)) is not None:
            rows.append(_row(name, fastest.config, larger, fastest.step))
    yield from _table(rows)


def _row(name: str, config: RunConfig, work: Workload, step: Step) -> list[str]:
    used = needed_gpus(config)
    counts = [f"{used}", f"{config.trainer.procs}", f"{config.generator.num_replicas}", f"{work.episodes:,}"]
    return [name, *counts, f"{step.seconds:.3g}", f"{step.tokens / step.seconds:,.0f}", step.bottleneck]


def widest(config: RunConfig, work: Workload, cluster: Cluster) -> Forecast | None:
    """Find the fastest division of a cluster between trainer and generators.

    GPUs that make nothing faster stay idle. Tensor and context parallelism and the size of an engine don't change.

    Returns:
        The forecast of that division, or None if a role runs without GPUs or no division has enough memory.
    """
    trainer, generator = config.trainer, config.generator
    if not (trainer.with_gpus and generator.with_gpus):
        return None
    model = trainer.parallelism.tensor_parallel_degree * trainer.parallelism.context_parallel_degree
    reserved = config.grpo.reference.procs * config.grpo.reference.with_gpus
    best: Forecast | None = None
    for data in _degrees(model, cluster.count - reserved):
        most = (cluster.count - reserved - data * model) // generator.procs
        for replicas in sorted({most, *(2**power for power in range(most.bit_length()))}):
            if not replicas or data > work.episodes:
                continue
            wide = config.model_copy(
                update={
                    "trainer": trainer.model_copy(update={"procs": data * model}),
                    "generator": generator.model_copy(update={"num_replicas": replicas}),
                }
            )
            forecast = Forecast(wide, work, cluster)
            faster = best is None or forecast.step.seconds < best.step.seconds
            if faster and all(holder.fits for holder in forecast.holders):
                best = forecast
    return best


def _degrees(model: int, room: int) -> Iterator[int]:
    """Yield data-parallel degrees with which the trainer uses whole hosts, or a number of GPUs that divides a host.

    Args:
        model: processes of one model copy: tensor times context parallelism.
        room: upper bound of the trainer's processes, exclusive.
    """
    for procs in range(model, room, model):
        if procs % PER_HOST == 0 or PER_HOST % procs == 0:
            yield procs // model


def _assumed(forecast: Forecast, question: Question) -> Iterator[str]:
    yield "time and cost are rough: on one H200, a small model took 1.5 to 1.7 times as long as forecast"
    if question.reply is None and forecast.config.rolls_out:
        yield f"replies are half as long as they may be, {forecast.work.reply} tokens: --reply N"
    elif question.reply is None:
        yield f"conversations have {forecast.work.prompt + forecast.work.reply} tokens: --prompt N --reply N"
    if question.prompt is None and forecast.config.rolls_out:
        yield f"the rest of an episode has {forecast.work.prompt} tokens: --prompt N"
    if forecast.config.rolls_out:
        yield "tools and sandboxes take no time, and episodes have one turn"
    if forecast.needed:
        yield f"{RESERVED_GIB:g} GiB of each GPU are reserved for CUDA, NCCL and fragmentation"
        yield f"{forecast.cluster.gpu.name}: {forecast.cluster.gpu.source}"
    if forecast.shape.sinks and forecast.config.trainer.with_gpus:
        yield "masks and scores of attention sinks are not counted in the trainer's memory"
    for constant in vars(hardware).values():
        if isinstance(constant, Constant) and constant.kind == "assumed" and forecast.needed:
            yield f"{constant.source}: {constant.value:g}"
    yield "docs/plan.md describes the model, its constants and its checks"


def _gib(count: float | None) -> str:
    return "" if count is None else f"{count / GIB:.2f}"


def _parts(parts: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {_seconds(value)}" for name, value in parts.items() if value > 0)


def _table(rows: list[list[str]]) -> Iterator[str]:
    widths = [max(len(row[column]) for row in rows if column < len(row)) for column in range(max(map(len, rows)))]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        yield f"  {'  '.join(cells)}".rstrip()
