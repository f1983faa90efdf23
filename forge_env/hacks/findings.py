"""Is the reward earned? What the recorded episodes of a run, an evaluation or a foreign agent say about that.

Four questions, each with what it rests on:

    gap       does what is rewarded rise away from what is held out, or from the hidden tests?
    judged    does a second, stricter judge pay as much, on a sample?
    paid      were episodes paid more than others of their task although their hidden score is lower?
    signs     what did agents write that goes for the score and not for the task (`forge_env.hacks.catalogue`)?
"""

from __future__ import annotations

import inspect
import math
import random
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean, pvariance
from typing import Any

from forge_env.errors import UsageError, with_place
from forge_env.hacks.catalogue import CATALOGUE
from forge_env.hacks.transcripts import Played, read, whole
from forge_env.run.folder import RunFolder
from forge_env.run.metrics import read_metrics
from forge_env.run.trained import read_trained
from forge_env.trajectory import DAMAGE, Trajectory

WINDOWS = 5
"""Parts of a run whose gaps are shown."""
SAMPLE = 64
"""Episodes that a second judge is asked about."""
SHOWN = 20
"""Episodes that are named of each kind."""
LEAST_GAP, SIGMAS = 0.1, 3.0
"""A gap has widened where it grew by more than both: of the reward's own scale, and of its standard error."""
HIDDEN, VISIBLE = ("hidden", "private", "held_out", "heldout"), ("visible", "public")
"""Words in the names of metrics by which they are found."""
EPSILON = 1e-9

Judge = Callable[[Trajectory], float | Awaitable[float]]
"""A second judge: the score of an episode, on the scale of its reward."""


@dataclass(frozen=True, slots=True)
class Window:
    """A part of a run, and what was earned in it.

    Attributes:
        first: training step; 0 where there are none.
        last: likewise.
        episodes: in it.
        visible: mean of what is rewarded, or of the visible tests.
        hidden: mean of the hidden score there; None: it was not taken.
        stderr: of their difference.
    """

    first: int
    last: int
    episodes: int
    visible: float
    hidden: float | None
    stderr: float

    @property
    def gap(self) -> float | None:
        """Visible less hidden."""
        return None if self.hidden is None else self.visible - self.hidden


@dataclass(frozen=True, slots=True)
class Named:
    """An episode that is worth reading.

    Attributes:
        id: of it.
        task: its task.
        reward: what it earned.
        other: its hidden score, or what the second judge gives.
        sign: what was found in it.
        text: where.
    """

    id: str
    task: str
    reward: float | None
    other: float | None = None
    sign: str = ""
    text: str = ""


@dataclass(frozen=True, slots=True)
class Judged:
    """A sample of rewarded episodes before a second judge."""

    episodes: int
    mean_reward: float
    mean_judged: float
    overpaid: int
    failed: int
    """It raised."""
    why: str = ""
    """What it raised first, and where."""


@dataclass(frozen=True, slots=True)
class SignCount:
    """How often a sign was found.

    Attributes:
        sign: its name.
        reason: what it may mean.
        episodes: that have it.
        reward: their mean.
        others: mean of the episodes of the same tasks without it; None: there are none.
    """

    sign: str
    reason: str
    episodes: int
    reward: float | None
    others: float | None


@dataclass(slots=True)
class Findings:
    """What was found in a folder.

    Attributes:
        name: of the folder.
        episodes: looked at.
        left_out: so many more were not, since only a sample was wanted.
        damaged: records that can't be read.
        visible_name: what `Window.visible` is.
        hidden_name: what `Window.hidden` is; empty: nothing is known of any.
        windows: over the run.
        widened: by how much the gap is larger at the end than at the beginning, where that is no chance.
        judged: what a second judge said, where there is one.
        paid: episodes paid more than others of their task for a lower hidden score.
        paid_count: how many there are.
        signs: counted.
        suspicious: episodes with any sign.
        examples: of what was found.
    """

    name: str
    episodes: int = 0
    left_out: int = 0
    damaged: int = 0
    visible_name: str = "reward"
    hidden_name: str = ""
    windows: list[Window] = field(default_factory=list)
    widened: float | None = None
    judged: Judged | None = None
    paid: list[Named] = field(default_factory=list)
    paid_count: int = 0
    signs: list[SignCount] = field(default_factory=list)
    suspicious: int = 0
    examples: list[Named] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)

    @property
    def words(self) -> str:
        """The result in a sentence."""
        if not self.episodes:
            return "No episodes are recorded."
        found = []
        if self.widened is not None:
            found.append(f"{self.visible_name} rose {self.widened:.2f} away from {self.hidden_name}")
        if self.judged is not None and self.judged.overpaid:
            found.append(f"a second judge pays less for {self.judged.overpaid} of {self.judged.episodes}")
        if self.paid_count:
            found.append(f"{self.paid_count:,} episodes were paid more for a lower {self.hidden_name}")
        if self.suspicious:
            share = self.suspicious / self.episodes
            found.append(f"{self.suspicious:,} of {self.episodes:,} episodes ({share:.1%}) show a sign")
        return f"{'; '.join(found)}." if found else f"Nothing suspicious in {self.episodes:,} episodes."


def find(
    root: Path,
    *,
    visible: str | None = None,
    hidden: str | None = None,
    most: int | None = None,
    judge: Judge | None = None,
    sample: int = SAMPLE,
) -> Findings:
    """Look at a run, an evaluation, or a folder or file of transcripts.

    Args:
        root: the folder or file: trajectories of forge-env, ATIF documents, or conversations in OpenAI's format.
        visible: metric that the agent can see; None: a metric named so, or else the reward.
        hidden: metric that it can't; None: one named so, or else the held-out score of a training run.
        most: look at no more episodes than these, spread evenly; None: at all.
        judge: a second judge; its exceptions are counted.
        sample: episodes that it is asked about, of those that earned something.

    Raises:
        UsageError: there is no episode, none has such a metric, or a judge can't be shown a foreign agent's.
        OSError: a file can't be read.
    """
    transcripts = read(root, most)
    episodes = transcripts.episodes
    found = Findings(root.name, len(episodes), transcripts.left_out, transcripts.damaged)
    names = sorted({name for own in episodes for name in own.metrics})
    for wanted in (visible, hidden):
        if wanted not in (None, "reward", *names):
            raise UsageError(
                f"no episode has the metric {wanted!r}", fix=f"there are: {', '.join(['reward', *names]) or 'none'}"
            )
    found.visible_name = visible or _named(names, VISIBLE) or "reward"
    metric = hidden or _named(names, HIDDEN)
    _measure_gap(root, episodes, found, metric)
    other: dict[str, float] = {}
    if metric:
        other = {own.id: value for own in episodes if (value := _value(own, metric)) is not None}
    if judge is not None:
        _ask(judge, episodes, sample, found)
    _look_for_paid(episodes, other, found)
    _count_signs(episodes, found)
    return found


def _named(names: Sequence[str], words: Sequence[str]) -> str | None:
    return next((name for word in words for name in names if word in name.lower()), None)


def _value(own: Played, name: str) -> float | None:
    return own.reward if name == "reward" else own.metrics.get(name)


# --- the gap


def _measure_gap(root: Path, episodes: Sequence[Played], found: Findings, metric: str | None) -> None:
    steps = _steps(root)
    own = [
        episode for episode in episodes if (episode.kind == "train" or episode.kind.startswith("train-")) == bool(steps)
    ]
    timed = [(0 if episode.group is None else steps.get(episode.group, 0), episode) for episode in own]
    timed = [(step, episode) for step, episode in timed if step or not steps]
    scores = {} if metric else _held_out(root)
    found.hidden_name = metric or ("held-out score" if scores else "")
    for first, last in _split(sorted({step for step, _ in timed})):
        inside = [episode for step, episode in timed if first <= step <= last]
        pairs = [(_value(episode, found.visible_name), metric and _value(episode, metric)) for episode in inside]
        visible = [value for value, _ in pairs if value is not None]
        if not visible:
            continue
        if metric:
            differences = [one - float(two) for one, two in pairs if one is not None and two is not None]
            hidden = fmean(visible) - fmean(differences) if differences else None
            error = _stderr(differences)
        else:
            near = [scores[step] for step in scores if first <= step <= last]
            hidden = fmean(score for score, _ in near) if near else None
            error = math.hypot(_stderr(visible), fmean(own for _, own in near) if near else 0.0)
        found.windows.append(Window(first, last, len(visible), fmean(visible), hidden, error))
    known = [window for window in found.windows if window.gap is not None]
    if len(known) > 1:
        first_gap, last_gap = (window.gap or 0.0 for window in (known[0], known[-1]))
        scale = max(abs(window.visible) for window in known) or 1.0
        chance = SIGMAS * math.hypot(known[0].stderr, known[-1].stderr)
        widened = last_gap - first_gap
        found.widened = widened if widened > max(LEAST_GAP * min(scale, 1.0), chance) else None


def _steps(root: Path) -> dict[int, int]:
    """Of a training run, the step that each group was trained in."""
    path = RunFolder(root).trained
    if not root.is_dir() or not path.exists():
        return {}
    return {group.group: step for step, groups in read_trained(path).steps.items() for group in groups}


def _held_out(root: Path) -> dict[int, tuple[float, float]]:
    """Held-out scores by step, with their standard errors; of the first split that has any."""
    found: dict[int, tuple[float, float]] = {}
    split = None
    for row in read_metrics(RunFolder(root).metrics) if root.is_dir() else ():
        for key, value in row.items():
            if key.startswith("eval/") and key.endswith("/score") and isinstance(value, float) and split in (None, key):
                split = key
                found[int(row["step"])] = value, float(row.get(f"{key.removesuffix('score')}stderr") or 0.0)
    return found


def _split(steps: Sequence[int]) -> Iterator[tuple[int, int]]:
    """At most `WINDOWS` ranges of steps, of about the same length."""
    count = min(WINDOWS, len(steps))
    for number in range(count):
        inside = steps[number * len(steps) // count : (number + 1) * len(steps) // count]
        yield inside[0], inside[-1]


def _stderr(values: Sequence[float]) -> float:
    return math.sqrt(pvariance(values) / len(values)) if len(values) > 1 else 0.0


# --- a second judge


def _ask(judge: Judge, episodes: Sequence[Played], sample: int, found: Findings) -> None:
    rewards = [own.reward for own in episodes if own.reward is not None]
    low = min(rewards, default=0.0)
    earned = [own for own in episodes if own.reward is not None and (own.reward > low or low == max(rewards))]
    chosen = random.Random(0).sample(earned, min(sample, len(earned)))  # the same ones every time
    scored: list[tuple[Played, float]] = []
    failed: list[Exception] = []
    for own in chosen:
        try:
            episode = whole(own)
        except DAMAGE:
            found.damaged += 1
            continue
        try:
            scored.append((own, _said(judge, episode)))
        except Exception as error:  # noqa: BLE001 - the boundary of somebody's function: one must not cost the others
            failed.append(error)
    why = with_place(failed[0]) if failed else ""
    if not scored:
        found.judged = Judged(0, 0.0, 0.0, 0, len(failed), why)
        return
    overpaid = [(own, score) for own, score in scored if (own.reward or 0.0) - score > EPSILON]
    found.judged = Judged(
        len(scored),
        fmean(own.reward or 0.0 for own, _ in scored),
        fmean(score for _, score in scored),
        len(overpaid),
        len(failed),
        why,
    )
    worst = sorted(overpaid, key=lambda pair: pair[1] - (pair[0].reward or 0.0))[:SHOWN]
    found.examples += [Named(own.id, own.task, own.reward, score, "judged lower") for own, score in worst]


def _said(judge: Judge, episode: Trajectory) -> float:
    import asyncio

    said = judge(episode)
    if inspect.isawaitable(said):

        async def wait() -> float:
            return float(await said)

        return asyncio.run(wait())
    return float(said)


# --- paid more for less, and signs


def _look_for_paid(episodes: Sequence[Played], other: Mapping[str, float], found: Findings) -> None:
    groups: dict[tuple[str, str, int | None], list[Played]] = defaultdict(list)
    for own in episodes:
        if own.reward is not None and own.id in other:
            groups[own.kind, own.task, own.group].append(own)
    for members in groups.values():
        reward, hidden = fmean(own.reward or 0.0 for own in members), fmean(other[own.id] for own in members)
        for own in members:
            if (own.reward or 0.0) > reward + EPSILON and other[own.id] < hidden - EPSILON:
                found.paid_count += 1
                if len(found.paid) < SHOWN:
                    found.paid.append(Named(own.id, own.task, own.reward, other[own.id], "paid more for less"))


def _count_signs(episodes: Sequence[Played], found: Findings) -> None:
    by_task: dict[str, list[Played]] = defaultdict(list)
    for own in episodes:
        by_task[own.task].append(own)
    for sign in CATALOGUE:
        having = [own for own in episodes if any(hit.sign == sign.name for hit in own.hits)]
        if not having:
            continue
        ids = {id(own) for own in having}
        tasks = {own.task for own in having}
        others = [own for task in sorted(tasks) for own in by_task[task] if id(own) not in ids]
        found.signs.append(SignCount(sign.name, sign.reason, len(having), _mean(having), _mean(others)))
        best = sorted(having, key=lambda own: -(own.reward or 0.0))[:3]
        found.examples += [
            Named(own.id, own.task, own.reward, None, sign.name, next(h.text for h in own.hits if h.sign == sign.name))
            for own in best
        ]
    found.suspicious = sum(bool(own.hits) for own in episodes)
    found.signs.sort(key=lambda own: -own.episodes)


def _mean(episodes: Sequence[Played]) -> float | None:
    rewards = [own.reward for own in episodes if own.reward is not None]
    return fmean(rewards) if rewards else None
