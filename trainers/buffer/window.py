"""How old a trained token can be: admission by slots, selection by due date. Pure arithmetic, no tasks.

Let P be the groups of a training step and S the bound on staleness (`max_off_policy_steps`). A group admitted
while the generators hold policy version v samples no token older than v, and is *due* at step v + S: trained
there, by the trainer at version v + S, its oldest token is S updates old. Trained later it would break the bound.

Admission: at most B = (S + 1) P groups are between admission and release, where a group is released when the
weights that it helped to train have reached the generators. So at version c at most P (S + 1) groups are
untrained, and none of them is due before c.

Selection: a step takes the P oldest groups that are complete, provided that what remains can still be trained
in time: for every date d, the remaining groups due by d fit into the steps up to d,

    |{g : due(g) <= d}| <= P (d - c)        for the next step c + 1 on.

By earliest-due-date this is necessary and sufficient, so the bound holds always, and a straggler is passed over
exactly as long as that costs nobody his due date. Otherwise the step waits for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def slots(per_step: int, max_off_policy_steps: int) -> int:
    """Groups that may be between admission and release at once: B = (S + 1) P."""
    return (max_off_policy_steps + 1) * per_step


def feasible(due: Iterable[int], version: int, per_step: int) -> bool:
    """Whether groups due at these versions can all be trained in time by steps at `version`, `version + 1`, ..."""
    dates = sorted(due)
    return all(position < per_step * (date - version + 1) for position, date in enumerate(dates))


def select(
    pending: Sequence[tuple[int, bool]], version: int, per_step: int, max_off_policy_steps: int
) -> list[int] | None:
    """Which groups the step at `version` trains on.

    Args:
        pending: of every untrained group in order of admission: the version it was admitted at, and whether it is
            complete.
        version: the trainer's policy version.
        per_step: P.
        max_off_policy_steps: S.

    Returns:
        Positions in `pending` of the P groups to train on, or None when the step has to wait for more.
    """
    complete = [position for position, (_, done) in enumerate(pending) if done]
    if len(complete) < per_step:
        return None
    chosen = complete[:per_step]
    taken = set(chosen)
    rest = [admitted + max_off_policy_steps for position, (admitted, _) in enumerate(pending) if position not in taken]
    return chosen if feasible(rest, version + 1, per_step) else None
