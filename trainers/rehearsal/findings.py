"""Faults that show in a simulated run, each with the key to change. Several are confirmed by a second simulation."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from pydantic import BaseModel

from forge_env.config.reader import section_of
from forge_env.config.recipe import RunConfig
from forge_env.errors import ForgeError
from forge_env.figures import duration
from forge_env.run.preflight import check_plugins
from forge_env.run.rehearsal import Finding
from trainers.algorithms.grpo import GRPO
from trainers.loop import checks
from trainers.rehearsal.stage import Performance, Scene, perform

CUT, LATE = 0.05, 0.02
"""Shares of cut replies or episodes, and of late episodes, that are a fault."""
WAITS, FASTER = 0.15, 0.9
"""Share of an actor's time that is long to wait, and step time relative to the recipe's that confirms a cause."""
FEW, FEW_BY_DEFAULT = 0.1, 0.5
"""Shares of the episodes' time spent waiting for a sandbox that are a fault: of a stated number of sandboxes, and of
the default, which depends on the processors, so that more need not help."""
SAVING = 0.02
"""Share of the trainer's time that checkpoints may cost."""
MOST_LOST_S = 3600.0
"""Seconds of training that the death of a trainer may lose."""
step_time = partial(duration, fine=True)
"""Format the duration of a step; below a second in milliseconds, since two are compared."""
_DOTTED = re.compile(r"[a-z_]+(?:\.[a-z_]+)+")


def known_key(key: str) -> bool:
    """Whether a recipe has this key, or a section with it."""
    model: type[BaseModel] | None = RunConfig
    for name in key.split("."):
        if model is None:
            return True  # below a dictionary, such as environment.options
        if name not in model.model_fields:
            return False
        model = section_of(model.model_fields[name].annotation)
    return True


def refused(error: ForgeError, otherwise: str) -> Finding:
    """Convert an error of the recipe's own checks to a finding; `otherwise` is its key if it names none."""
    keys = (match[0] for match in _DOTTED.finditer(f"{error.message} {error.fix or ''}"))
    return Finding(next(filter(known_key, keys), otherwise), error.message, error.fix or "see forge-env config")


def check(config: RunConfig) -> Iterator[Finding]:
    """Make those of the recipe's own checks that need neither GPUs, data nor a download."""
    looks: list[Callable[[RunConfig], object]] = [
        *(check_plugins, checks.check_parallelism, checks.check_devices, checks.check_idle_options),
        *(checks.check_workers, checks.check_lora, checks.check_reference, checks.check_renderer, checks.check_loss),
        GRPO.check,
    ]
    for look in looks:
        try:
            look(config)
        except ForgeError as error:
            yield refused(error, "method")


def changed(config: RunConfig, **values: Any) -> RunConfig:
    """Copy a recipe with other values of `section__key`."""
    data = config.model_dump()
    for name, value in values.items():
        *sections, key = name.split("__")
        inner = data
        for section in sections:
            inner = inner[section]
        inner[key] = value
    return RunConfig.model_validate(data)


class Critic:
    """Looks for faults in a performance.

    Args:
        scene: what was simulated.
        performance: the result.
    """

    def __init__(self, scene: Scene, performance: Performance) -> None:
        self.scene, self.performance, self.config = scene, performance, scene.config
        self._found: set[str] = set()
        """Keys of the findings so far: what they explain is not blamed on other keys."""

    def findings(self) -> Iterator[Finding]:
        """Yield all faults."""
        looks: list[Callable[[], Iterator[Finding]]] = [self._sandboxes, self._cuts, self._late, self._group]
        if self.performance.steps > self.performance.skipped:
            looks += [self._replay, self._staleness, self._batch]
            looks += [self._checkpoints, self._lost_work, self._watchdog, self._evaluations]
        for look in looks:
            for finding in look():
                self._found.add(finding.key)
                yield finding
        if (error := self.performance.error) is not None:
            yield refused(error, "grpo.group_timeout_s")

    def _again(self, **values: Any) -> float:
        """Seconds of a step with other values of some keys."""
        config = changed(self.config, **values)
        timing = self.scene.timing
        if "generator__max_num_seqs" in values:
            timing = replace(timing, capacity=config.generator.max_num_seqs)
        return perform(replace(self.scene, config=config, timing=timing)).step_s

    # --- lengths

    def _cuts(self) -> Iterator[Finding]:
        cuts, grpo = self.performance.cuts, self.config.grpo
        if cuts.replies and (share := cuts.by_turn / cuts.replies) > CUT:
            yield Finding(
                "grpo.max_tokens_per_turn",
                f"{100 * share:.0f} % of the replies are cut at {grpo.max_tokens_per_turn} tokens",
                f"use grpo.max_tokens_per_turn={self._length(by_turn=True)} or more, for 99 % of the replies",
            )
        if cuts.episodes and (share := cuts.by_context / cuts.episodes) > CUT:
            yield Finding(
                "model.max_length",
                f"{100 * share:.0f} % of the episodes are cut at {self.config.model.max_length} tokens of context",
                f"use model.max_length={self._length(by_turn=False)} or more, for 99 % of the episodes",
            )

    def _length(self, *, by_turn: bool) -> int:
        """99th percentile of the tokens of a reply, or of a whole episode."""
        most = self.config.grpo.max_tokens_per_turn
        lengths = []
        for index in range(max(64, self.config.grpo.groups_per_step)):
            for script in self.scene.episodes.group(index):
                if by_turn:
                    lengths += [turn.reply for turn in script.turns]
                else:
                    lengths.append(sum(turn.prompt + min(turn.reply, most) for turn in script.turns))
        return sorted(lengths)[int(0.99 * (len(lengths) - 1))]

    def _late(self) -> Iterator[Finding]:
        cuts, grpo = self.performance.cuts, self.config.grpo
        if (episodes := cuts.episodes + cuts.late) and (share := cuts.late / episodes) > LATE:
            fate = "left out" if grpo.on_timeout == "leave_out" else "trained on with reward 0"
            if grpo.on_timeout != "wait":
                yield Finding(
                    "grpo.group_timeout_s",
                    f"{100 * share:.0f} % of the episodes take longer than {grpo.group_timeout_s:g} s, and are {fate}",
                    "raise grpo.group_timeout_s, or use grpo.on_timeout=wait",
                )

    # --- buffer and generators

    def _group(self) -> Iterator[Finding]:
        forecast, size = self.scene.timing.forecast, self.config.grpo.group_size
        if forecast.cached >= size:
            return
        generator, job = self.config.generator, self.config.job
        on_cpu = not generator.with_gpus
        key = "generator.kv_cache_gb" if job.share_gpus or on_cpu else "generator.procs"
        yield Finding(
            key,
            f"a group of {size} episodes is larger than an engine's cache, which holds the keys and values of "
            f"{forecast.cached} of them: the others wait",
            f"raise {key}, or lower grpo.group_size",
        )

    def _replay(self) -> Iterator[Finding]:
        stats, replay = self.performance.stats, self.config.grpo.replay
        if stats.evicted > stats.reused and replay.max_uses > 1:
            most = self.config.grpo.groups_per_step * (replay.max_uses - 1)
            yield Finding(
                "grpo.replay.capacity",
                f"the buffer drops {stats.evicted} of {stats.evicted + stats.reused} groups before their second use: a "
                f"step has {self.config.grpo.groups_per_step} groups, and replay.capacity={replay.capacity}",
                f"use grpo.replay.capacity={most} or more, or leave it unset",
            )

    def _staleness(self) -> Iterator[Finding]:
        performance, grpo = self.performance, self.config.grpo
        waits = performance.share("trainer", "wait for episodes")
        idle = performance.share("generator", "wait for requests")
        shared = self.config.generator.sleep or self.config.job.share_gpus or "sandbox.concurrency" in self._found
        if min(waits, idle) < WAITS or shared:
            return
        other = self._again(grpo__max_off_policy_steps=grpo.max_off_policy_steps + 1)
        if other < FASTER * performance.step_s:
            yield Finding(
                "grpo.max_off_policy_steps",
                f"{grpo.max_off_policy_steps} starves the trainer: it waits for episodes {100 * waits:.0f} % of its "
                f"time, while the generators wait for requests {100 * idle:.0f} % of theirs",
                f"with {grpo.max_off_policy_steps + 1}, a step takes {step_time(other)} "
                f"instead of {step_time(performance.step_s)}",
            )

    def _sandboxes(self) -> Iterator[Finding]:
        waits, config = self.performance.share("episodes", "wait for a sandbox"), self.config
        if waits < (FEW if config.sandbox.concurrency else FEW_BY_DEFAULT):
            return
        episodes = config.grpo.groups_per_step * config.grpo.group_size * (config.grpo.max_off_policy_steps + 1)
        other = self._again(sandbox__concurrency=episodes)
        before = self.performance.step_s
        if 0 < other < (0.95 * before or float("inf")):
            instead = f"instead of {step_time(before)}" if before else "and the run does not fail"
            now = config.sandbox.concurrency or f"unset, so {4 * self.scene.cpus}"
            yield Finding(
                "sandbox.concurrency",
                f"sandboxes are too few ({now}): episodes wait for one {100 * waits:.0f} % of their time",
                f"with one for each of the {episodes} open episodes, a step takes {step_time(other)} {instead}",
            )

    def _batch(self) -> Iterator[Finding]:
        forecast, section = self.scene.timing.forecast, self.config.generator
        generate_s = self.performance.seconds.get("episodes", {}).get("generate", 0.0)
        most = min(forecast.cached, 2 * section.max_num_seqs)
        if not generate_s or most <= section.max_num_seqs or self.performance.queued_s < 0.2 * generate_s:
            return
        other = self._again(generator__max_num_seqs=most)
        if other < FASTER * self.performance.step_s:
            yield Finding(
                "generator.max_num_seqs",
                f"{section.max_num_seqs} sequences at once are few: requests wait for a place in an engine",
                f"with {most}, a step takes {step_time(other)} instead of {step_time(self.performance.step_s)}",
            )

    # --- checkpoints and the watchdog

    def _interval(self) -> tuple[float, str]:
        """Seconds between two checkpoints, and the key that sets them; infinite without any."""
        section, step_s = self.config.checkpoint, self.performance.step_s
        every: list[tuple[float, str]] = []
        if section.every:
            every.append((section.every * step_s, "checkpoint.every"))
        if section.keep_best and self.config.evaluation.every:
            every.append((self.config.evaluation.every * step_s, "checkpoint.keep_best"))
        if section.minutes:
            every.append((max(step_s, section.minutes * 60), "checkpoint.minutes"))
        return min(every, default=(float("inf"), "checkpoint.minutes"))

    def _checkpoints(self) -> Iterator[Finding]:
        timing, (interval, key) = self.scene.timing, self._interval()
        share = timing.save_s / (max(interval, timing.write_s) + timing.save_s)
        step_s = self.performance.step_s
        apart = timing.save_s / SAVING
        rarer = {
            "checkpoint.every": f"{apart / step_s:.0f} or more",
            "checkpoint.minutes": f"{apart / 60:.1f} or more",
            "checkpoint.keep_best": "0: every evaluated step is saved otherwise",
        }
        if share > SAVING:
            yield Finding(
                key,
                f"checkpoints cost {100 * share:.1f} % of the time: the trainer waits {duration(timing.save_s)} "
                f"for each, one every {duration(interval)}",
                f"use {key}={rarer[key]}",
            )
        elif key == "checkpoint.every" and timing.write_s > interval:
            yield Finding(
                key,
                f"a checkpoint is due every {duration(interval)}, and takes {duration(timing.write_s)} to write, so "
                "most are skipped, and the disk is never idle",
                f"use {key}={-(-timing.write_s // step_s):.0f} or more, or a faster disk (--disk-speed)",
            )

    def _lost_work(self) -> Iterator[Finding]:
        interval, key = self._interval()
        interval = max(interval, self.scene.timing.write_s)
        whole = self.performance.step_s * self.config.grpo.steps
        if interval > MOST_LOST_S and whole > MOST_LOST_S:
            often = "no checkpoint is saved before the end" if interval > whole else f"one in {duration(interval)}"
            yield Finding(
                key,
                f"the death of the trainer's host loses up to {duration(min(interval, whole))} of training: {often}",
                "use checkpoint.minutes=30, or checkpoint.every",
            )

    def _watchdog(self) -> Iterator[Finding]:
        limit, quiet_s = self.config.watchdog.end_s, self.performance.quiet_s
        if 0 < limit <= quiet_s:
            yield Finding(
                "watchdog.end_s",
                f"the run would end itself: for {duration(quiet_s)} nothing is sampled and no step ends, while the "
                f"trainer is in '{self.performance.quiet}', and watchdog.end_s={limit:g}",
                f"use watchdog.end_s={2 * quiet_s:.0f}",
            )

    def _evaluations(self) -> Iterator[Finding]:
        if any("evaluation was skipped" in warning for warning in self.performance.warnings):
            section = self.config.evaluation
            yield Finding(
                "evaluation.every",
                f"evaluations of {section.num_tasks} tasks take longer than evaluation.every={section.every} steps, so "
                "some are skipped",
                "raise evaluation.every, or lower evaluation.num_tasks",
            )
