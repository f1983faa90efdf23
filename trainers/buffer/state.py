"""What a buffer holds and counts, saved and restored; and how it goes on after a restart."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from forge_env.errors import UsageError
from trainers.buffer.core import BufferCore
from trainers.buffer.pool import Pool
from trainers.buffer.types import BufferStats, Counters, G, Held, Ticket

FORMAT = 1


def stats(core: BufferCore[G]) -> BufferStats:
    """Counters and contents."""
    handed_out = [held for batch in core.in_training.values() for held in batch]
    unfinished = [held.index for held in [*core.ready, *handed_out]]
    return BufferStats(
        **asdict(core.counters),
        rolling=len(core.rolling) + len(core.late),
        ready=len(core.ready),
        in_training=len(handed_out),
        kept=len(core.used.pool),
        tokens_held=sum(held.tokens for held in [*core.ready, *core.used.pool, *handed_out]),
        first_open=min([*core.rolling, *core.late, *core.again, *unfinished], default=core.next_index),
        waiting_for=missing(core),
    )


def missing(core: BufferCore[G]) -> str | None:
    """What the next step waits for, in words; None: nothing, or there is no next step."""
    if core.settings.steps is not None and core.window.next_step >= core.settings.steps:
        return None
    if not core.enough():
        used = len(core.used.pool)
        usable = f"{len(core.ready)} ready" + (f" and {used} to use again" if used else "")
        return f"groups: {usable}, {len(core.rolling)} under way, {core.settings.per_step} wanted"
    late = core.late_version(core.window.quotas())
    if late is None:
        return None
    index = min(ticket.index for ticket in core.rolling.values() if ticket.version <= late)
    return f"group {index}: it is due, or the bound would be broken"


def restart(core: BufferCore[G], version: int) -> None:
    """Trainer and generators begin anew at `version`, with no rollout under way.

    Rollouts that were under way are admitted again under their index; groups handed out for steps that are not part
    of these weights are ready again.
    """
    core.window.next_step = core.window.generator_version = version
    for step in sorted(step for step in core.in_training if step >= version):
        for held in core.in_training.pop(step):
            core.hand_back(held)
    core.finish(version)
    for ticket in core.rolling.values():
        core.window.remove(ticket.version)
    core.counters.discarded += len(core.late)
    core.again = sorted([*core.again, *core.rolling])
    core.rolling, core.late = {}, {}
    core.drop_old()


def state_dict(core: BufferCore[G]) -> dict[str, Any]:
    """Everything that decides what the buffer does from here on, its random state included.

    Numbers, strings, lists and dictionaries, except the groups, which are as they were added.
    """
    return {
        "format": FORMAT,
        "generator_version": core.window.generator_version,
        "next_step": core.window.next_step,
        "next_index": core.next_index,
        "rolling": [[ticket.index, ticket.version] for ticket in core.rolling.values()],
        "late": [[ticket.index, ticket.version] for ticket in core.late.values()],
        "again": sorted(core.again),
        "ready": _pool_state(core.ready),
        "kept": _pool_state(core.used.pool),
        "in_training": {step: [_held_state(held) for held in batch] for step, batch in core.in_training.items()},
        "counters": asdict(core.counters),
        "filtered_in_a_row": core.filtered_in_a_row,
        "random": _as_lists(core.random.getstate()),
    }


def load_state_dict(core: BufferCore[G], state: dict[str, Any]) -> None:
    """Become what `state_dict` described. With the same settings the future is the same, to the last bit.

    With others (more steps, another bound), what does not fit into them is dropped and counted.

    Raises:
        UsageError: another version of this program wrote it.
    """
    if state.get("format") != FORMAT:
        raise UsageError(
            f"the replay buffer's state has format {state.get('format')!r}, this version reads {FORMAT}",
            fix="go on from the checkpoint without it, or with the version that wrote it",
        )
    core.window.generator_version = state["generator_version"]
    core.window.next_step = state["next_step"]
    core.next_index = state["next_index"]
    core.rolling = _tickets(state["rolling"])
    core.late = _tickets(state["late"])
    core.again = sorted(state["again"])
    core.ready, core.used.pool = _pool(state["ready"]), _pool(state["kept"])
    core.in_training = {int(step): [Held(*held) for held in batch] for step, batch in state["in_training"].items()}
    core.counters = Counters(**state["counters"])
    core.filtered_in_a_row = state["filtered_in_a_row"]
    version, internal, gauss = state["random"]
    core.random.setstate((version, tuple(internal), gauss))
    rolling = (ticket.version for ticket in core.rolling.values())
    core.window.set_pending([*rolling, *(held.version for held in core.ready)])
    core.drop_old()


def _pool_state(pool: Pool[G]) -> list[list[Any]]:
    return [[key, *_held_state(held)] for key, held in pool.entries()]


def _held_state(held: Held[G]) -> list[Any]:
    return [getattr(held, name) for name in Held.__slots__]


def _pool(state: Iterable[list[Any]]) -> Pool[Any]:
    pool: Pool[Any] = Pool()
    for key, *held in state:
        pool.put(key, Held(*held))
    return pool


def _tickets(state: Iterable[list[int]]) -> dict[int, Ticket]:
    return {index: Ticket(index, version) for index, version in state}


def _as_lists(value: Any) -> Any:
    return [_as_lists(item) for item in value] if isinstance(value, tuple) else value
