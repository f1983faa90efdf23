"""How old a trained token can be: admission by slots, selection by due date. Pure arithmetic, no tasks.

Let P be the groups of a training step and S the bound on staleness (`max_off_policy_steps`). Step t is done by the
trainer at policy version t and makes version t + 1. A group admitted while the generators hold version g samples no
token older than g. A group whose oldest token is of version v is *due* at v + S: trained there, that token is S
updates old; trained later it would break the bound. The run's last step is a due date for every group.

Invariant, t being the next step and n(d) the number of pending (admitted and untrained) groups due by d:

    n(d) <= P (d - t + 1)        for every date d                                                   (1)

By earliest-due-date this is necessary and sufficient for all of them to be trained in time by steps of P groups.

Admission at g is allowed while all that are pending, the new group among them, are fewer than its slots:

    n + 1 <= P (g + S - t + 1)                                                                      (2)

The new group is due at g + S, no earlier than any other, so (2) is (1) for its date, and dates before don't count it.
With the trainer waiting for its weights to arrive (t = g) these are the (S + 1) P slots of a buffer whose groups are
released when the weights that they helped to train have reached the generators; every step handed out and not
released (t > g) takes P of them, whatever was in it. A group that is discarded leaves n at once, so another
one is admitted in its place, at the version and the due date of that moment: (2) is asked again, the bound stays.
A group whose oldest token turns out younger than its ticket is due later, which only helps.

Selection: step t takes any P complete groups such that what remains satisfies (1) for t + 1, that is, of the groups due
by d at least n(d) - P (d - t). These quotas (`Window.quotas`) are nested, so any order of preference can be followed:
first fill the quotas, oldest date first and each in that order, then the rest. A group that is not complete is skipped
exactly as long as all other due dates can still be met; otherwise the step waits for it. By (1) no quota is above P, so
when all pending groups are complete and there are P of them, there is a batch: no deadlock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import accumulate


class Window:
    """Counts pending groups by the version of their oldest token, and knows what can still be trained in time.

    Args:
        per_step: P.
        max_off_policy_steps: S.
        steps: of the whole run; None: endless.
        version: policy version to begin at.
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
        """The last step that may train on tokens of `version`, and that the run has."""
        due = version + self.max_off_policy_steps
        return due if self.steps is None else min(due, self.steps - 1)

    def steps_left(self, version: int) -> int:
        """Steps that may train on tokens of `version`, the next one included."""
        return max(0, self.due(version) - self.next_step + 1)

    def fits(self, version: int) -> bool:
        """Whether (1) holds with one more group of `version`."""
        if self.total < self.per_step * self.steps_left(version):
            return True  # (2): even if all were due no later than this one
        before = 0
        for own in sorted({*self.pending, version}):
            before += self.pending[own]
            if own >= version and before >= self.per_step * self.steps_left(own):
                return False
        return True

    def add(self, version: int) -> None:
        """One more group is pending."""
        self.pending[version] += 1
        self.total += 1

    def remove(self, version: int, count: int = 1) -> None:
        """Groups were handed out, dropped or lost."""
        self.pending[version] -= count
        self.total -= count
        if not self.pending[version]:
            del self.pending[version]

    def set_pending(self, versions: Sequence[int]) -> None:
        """These and no others are pending."""
        self.pending = Counter(versions)
        self.total = len(versions)

    def quotas(self) -> list[tuple[int, int]]:
        """What the next step can't leave to later ones, in ascending order of versions.

        Returns:
            `(version, count)`: at least `count` of the groups trained on are of that version or older. The counts
            ascend; a quota that an older version's implies is left out.
        """
        return self._beyond(self.next_step)

    def excess(self) -> list[tuple[int, int]]:
        """`(version, count)` in ascending order: how many groups break (1), those of older versions that do left out.

        Empty while groups are admitted by `fits` and every step is sampled by `quotas`.
        """
        found, dropped = [], 0
        for version, count in self._beyond(self.next_step - 1):
            found.append((version, count - dropped))
            dropped = count
        return found

    def overdue(self) -> bool:
        """Whether a pending group was due before the next step."""
        return self.total > 0 and self.due(min(self.pending)) < self.next_step

    def _beyond(self, step: int) -> list[tuple[int, int]]:
        """How many groups of a version or older have no place in the steps after `step`, where that ascends."""
        last = None if self.steps is None else self.steps - 1
        versions = sorted(self.pending)
        found, most = [], 0
        for version, total in zip(versions, accumulate(map(self.pending.__getitem__, versions)), strict=True):
            due = version + self.max_off_policy_steps
            places = self.per_step * ((due if last is None or due < last else last) - step)
            if total - places > most:
                most = total - max(places, 0)
                found.append((version, most))
        return found
