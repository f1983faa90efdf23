"""The staleness bound: admission by slots, selection by due date. Pure arithmetic, without asyncio.

Let P be the number of groups per training step and S the bound on staleness (`max_off_policy_steps`). Step t trains
policy version t and produces version t + 1. A group admitted while the generators hold version g samples no token
older than g. A group whose oldest token has version v is *due* at step v + S: there that token is S updates old, and
in a later step it would break the bound. No group is due later than the last step of the run.

Invariant, with t the next step and n(d) the number of pending (admitted and untrained) groups due by step d:

    n(d) <= P (d - t + 1)        for every step d                                                   (1)

By earliest-due-date scheduling this is necessary and sufficient for steps of P groups to train all of them in time.

Admission at version g is allowed while the pending groups, including the new one, fit into the steps until its due
date. With n pending groups before the admission:

    n + 1 <= P (g + S - t + 1)                                                                      (2)

The new group is due at g + S, no earlier than any other, so (2) is (1) for that date; earlier dates don't count it.
While the trainer waits for its weights to arrive (t = g), the right side is the (S + 1) P slots of a buffer that
releases groups once the weights they helped to train have reached the generators. Every step handed out and not
released (t > g) takes P slots, whatever groups it had. A discarded group leaves n at once, so another one is admitted
instead, with the current version and due date: (2) is checked again and the bound holds. A group whose oldest token is
younger than its ticket is due later, which only helps.

Selection: step t takes any P complete groups such that the remaining ones satisfy (1) for t + 1, that is, at least
n(d) - P (d - t) of the groups due by d. These quotas (`Window.quotas`) are nested, so any order of preference is
possible: first fill the quotas by ascending due date, each in the preferred order, then fill the rest. An incomplete
group is skipped as long as all other due dates can still be met; otherwise the step waits for it. By (1) no quota is
above P, so there is a batch whenever all pending groups are complete and there are P of them: no deadlock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate


class Window:
    """Counts of pending groups by the version of their oldest token, and the arithmetic of their due dates.

    Args:
        per_step: P, groups per training step.
        max_off_policy_steps: S, bound on staleness in policy updates.
        steps: training steps of the whole run; None: endless.
        version: initial policy version.
    """

    def __init__(self, per_step: int, max_off_policy_steps: int, steps: int | None = None, version: int = 0) -> None:
        self.per_step = per_step
        self.max_off_policy_steps = max_off_policy_steps
        self.steps = steps
        self.generator_version = version
        self.next_step = version
        self.pending: Counter[int] = Counter()
        self.total = 0

    def due(self, version: int) -> int:
        """The last step of the run that may train on tokens of `version`."""
        due = version + self.max_off_policy_steps
        return due if self.steps is None else min(due, self.steps - 1)

    def steps_left(self, version: int) -> int:
        """Number of steps that may train on tokens of `version`, including the next step."""
        return max(0, self.due(version) - self.next_step + 1)

    def fits(self, version: int) -> bool:
        """Whether (1) holds with one more group of `version`."""
        if self.total < self.per_step * self.steps_left(version):
            return True  # (2): fits even if all pending groups are due no later than this one
        count = 0
        for each in sorted({*self.pending, version}):
            count += self.pending[each]
            if each >= version and count >= self.per_step * self.steps_left(each):
                return False
        return True

    def add(self, version: int) -> None:
        """Count one more pending group."""
        self.pending[version] += 1
        self.total += 1

    def remove(self, version: int, count: int = 1) -> None:
        """Stop counting groups that were handed out, dropped or lost."""
        self.pending[version] -= count
        self.total -= count
        if not self.pending[version]:
            del self.pending[version]

    def set_pending(self, versions: Sequence[int]) -> None:
        """Replace the pending groups by groups of these versions."""
        self.pending = Counter(versions)
        self.total = len(versions)

    def quotas(self) -> list[tuple[int, int]]:
        """Minimum numbers of old groups that the next step must train, by ascending version.

        Returns:
            `(version, count)`: at least `count` of the step's groups must have that version or an older one. The
            counts ascend; quotas implied by that of an older version are left out.
        """
        return self._beyond(self.next_step)

    def excess(self) -> list[tuple[int, int]]:
        """Groups that break (1), as `(version, count)` by ascending version; each group is counted once.

        Empty while groups are admitted by `fits` and every step is sampled by `quotas`.
        """
        excess, dropped = [], 0
        for version, count in self._beyond(self.next_step - 1):
            excess.append((version, count - dropped))
            dropped = count
        return excess

    def overdue(self) -> bool:
        """Whether a pending group was due before the next step."""
        return self.total > 0 and self.due(min(self.pending)) < self.next_step

    def _beyond(self, step: int) -> list[tuple[int, int]]:
        """Groups of each version or older that the steps after `step` can't train in time, as `(version, count)`.

        Versions at which the count does not increase are left out.
        """
        last = None if self.steps is None else self.steps - 1
        versions = sorted(self.pending)
        beyond, most = [], 0
        for version, total in zip(versions, accumulate(map(self.pending.__getitem__, versions)), strict=True):
            due = version + self.max_off_policy_steps
            slots = self.per_step * ((due if last is None or due < last else last) - step)
            if total - slots > most:
                most = total - max(slots, 0)
                beyond.append((version, most))
        return beyond
