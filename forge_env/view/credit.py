"""The page of an episode's credits: `credit.html`, the conversation with a bar beside each tool call."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from forge_env.credit.results import Call, Credits
from forge_env.evaluation.estimates import Estimate
from forge_env.figures import duration
from forge_env.trajectory import Trajectory
from forge_env.view.records import CallView, MessageView, conversation
from forge_env.view.rendering import body, saved_page
from forge_env.view.report import LONGEST

WIDTH = 210
"""Width of a bar's drawing in pixels; 0 is in its middle."""
MOST_TURNS = 400
"""Maximum turns on the page; `credit.json` has the credits of all."""


def credit_page(credits: Credits, episode: Trajectory) -> str:
    """Render the page."""
    cost = credits.cost
    parts = [
        f"reward {credits.reward:g}",
        f"{cost.continuations:,} continuations by {credits.model}",
        f"{cost.turns:,} new turns",
        duration(cost.seconds),
    ]
    largest = [("environment", credits.environment), ("task", credits.task)]
    if (first := next((call.before for call in credits.calls), None)) is not None:
        largest.append((f"mean reward before turn {credits.calls[0].turn}", interval(first, signed=False)))
    largest += [(f"turn {call.turn}: {call.name or 'message'}", interval(call.credit)) for call in credits.ranked[:3]]
    title = f"Credit of {credits.run} {credits.episode}"
    main = body(
        "credit",
        saved=True,
        title=title,
        sub=" \u00b7 ".join(parts),
        state="ok" if credits.differs is None else "incomplete",
        notes=[*credits.notes()],
        largest=largest,
        continuations=credits.continuations,
        messages=_messages(credits, episode),
        more=max(0, len(episode.turns) - MOST_TURNS),
    )
    return saved_page(main, title)


def interval(estimate: Estimate | None, *, signed: bool = True) -> str:
    """Format a figure with its interval: +0.61 (+0.42 to +0.75)."""
    if estimate is None:
        return "unknown"
    sign = "+" if signed else ""
    value, low, high = (f"{number + 0.0:{sign}.2f}" for number in (estimate.value, estimate.low, estimate.high))
    return f"{value} ({low} to {high})"


def _messages(credits: Credits, episode: Trajectory) -> list[MessageView]:
    """Return the conversation; each call has its credit, and a message without calls its own."""
    reach = max((max(-one.low, one.high) for call in credits.calls if (one := call.credit)), default=0.0) or 1.0
    by_turn = {turn: list(calls) for turn, calls in groupby(credits.calls, key=lambda call: call.turn)}
    messages, at = conversation(episode, LONGEST), 0
    for number, turn in enumerate(episode.turns[:MOST_TURNS], start=1):
        answer = messages[at + len(turn.observation)]
        at += len(turn.observation) + 1
        credited: Sequence[CallView | MessageView] = answer.calls or [answer]
        for shown, call in zip(credited, by_turn.get(number, []), strict=False):
            shown.credit = _credit(call, reach)
    return messages if len(episode.turns) <= MOST_TURNS else messages[:at]


def _credit(call: Call, reach: float) -> dict[str, Any]:
    """Return the bar of a credit and its figure; `reach` is the end of the scale."""
    credit = call.credit
    if credit is None:
        return {"bar": None, "clear": False, "text": "unknown"}
    middle, scale = WIDTH / 2, (WIDTH / 2 - 4) / reach
    start, end = sorted((middle, middle + scale * credit.value))
    bar = {
        "css": ("good" if credit.value > 0 else "bad") if call.is_clear else "soft",
        "x": f"{start:.1f}",
        "width": f"{max(end - start, 1):.1f}",
        "low": f"{middle + scale * credit.low:.1f}",
        "high": f"{middle + scale * credit.high:.1f}",
    }
    title = f"before: {interval(call.before, signed=False)}, after: {interval(call.after, signed=False)}"
    if call.repeated is not None:
        title += f"; {call.repeated:.0%} of the continuations made it again"
    return {"bar": bar, "clear": call.is_clear, "text": interval(credit), "title": title}
