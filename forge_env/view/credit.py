"""The page of an episode's credits: `credit.html`, the conversation with a bar beside each tool call."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from forge_env.credit.results import Call, Credits
from forge_env.evaluation.estimates import Estimate
from forge_env.figures import duration
from forge_env.trajectory import Trajectory
from forge_env.types import Message, ToolCall
from forge_env.view.report import arguments_of, cut, escaped, message_html, page, section

WIDTH = 210
"""Width of a bar's drawing in pixels; 0 is in its middle."""
MOST_TURNS = 400
"""Maximum turns on the page; `credit.json` has the credits of all."""


LEGEND = (
    "beside each call: mean reward from after it minus from before it, of {} continuations; "
    "line: 95 % interval; grey: it contains 0"
)


def credit_page(credits: Credits, episode: Trajectory) -> str:
    """Render the page."""
    cost = credits.cost
    parts = [
        f"reward {credits.reward:g}",
        f"{cost.continuations:,} continuations by {credits.model}",
        f"{cost.turns:,} new turns",
        duration(cost.seconds),
    ]
    state = "ok" if credits.differs is None else "incomplete"
    return page(f"Credit of {credits.run} {credits.episode}", state, " \u00b7 ".join(parts), _body(credits, episode))


def _body(credits: Credits, episode: Trajectory) -> Iterator[str]:
    if notes := list(credits.notes()):
        yield f"<section>{''.join(f'<p>{escaped(text)}</p>' for text in notes)}</section>"
    cells = [("environment", credits.environment), ("task", credits.task)]
    if (first := next((call.before for call in credits.calls), None)) is not None:
        cells.append((f"mean reward before turn {credits.calls[0].turn}", interval(first, signed=False)))
    cells += [(f"turn {call.turn}: {call.name or 'message'}", interval(call.credit)) for call in credits.ranked[:3]]
    yield section("Largest credits, with 95 % intervals", cells)
    yield f"<section><h2>Conversation <small>{LEGEND.format(credits.continuations)}</small></h2>"
    yield from _turns(credits, episode)
    if (more := len(episode.turns) - MOST_TURNS) > 0:
        yield f'<p class="soft">{more} more turns</p>'
    yield "</section>"


def interval(estimate: Estimate | None, *, signed: bool = True) -> str:
    """Format a figure with its interval: +0.61 (+0.42 to +0.75)."""
    if estimate is None:
        return "unknown"
    sign = "+" if signed else ""
    value, low, high = (f"{number + 0.0:{sign}.2f}" for number in (estimate.value, estimate.low, estimate.high))
    return f"{value} ({low} to {high})"


def _turns(credits: Credits, episode: Trajectory) -> Iterator[str]:
    reach = max((max(-one.low, one.high) for call in credits.calls if (one := call.credit)), default=0.0) or 1.0
    by_turn = {turn: list(calls) for turn, calls in groupby(credits.calls, key=lambda call: call.turn)}
    for number, turn in enumerate(episode.turns[:MOST_TURNS], start=1):
        yield from map(message_html, turn.observation)
        yield _answer(turn.message, by_turn.get(number, []), reach)
    yield from map(message_html, episode.final_observation)


def _answer(message: Message, calls: list[Call], reach: float) -> str:
    """The model's message, with the credit of each of its calls, or of itself if it has none."""
    plain = message_html(message.model_copy(update={"tool_calls": []})).removesuffix("</div>")
    if not message.tool_calls:
        return f'{plain}<div class="credited"><i></i>{_beside(calls[0], reach) if calls else ""}</div></div>'
    shown: list[Call | None] = [*calls] if calls else [None] * len(message.tool_calls)
    rows = (
        f'<div class="credited"><pre dir="auto">{escaped(_call(call))}</pre>'
        f"{'' if credited is None else _beside(credited, reach)}</div>"
        for call, credited in zip(message.tool_calls, shown, strict=True)
    )
    return f"{plain}{''.join(rows)}</div>"


def _call(call: ToolCall) -> str:
    return cut(f"\u2192 {call.function.name}({arguments_of(call)})")


def _beside(call: Call, reach: float) -> str:
    """The bar of a credit and its figure; `reach` is the end of the scale."""
    credit = call.credit
    if credit is None:
        return '<i></i><span class="soft">unknown</span>'
    middle, scale = WIDTH / 2, (WIDTH / 2 - 4) / reach
    colour = f"var(--{'good' if credit.value > 0 else 'bad'})" if call.is_clear else "var(--soft)"
    start, end = sorted((middle, middle + scale * credit.value))
    low, high = middle + scale * credit.low, middle + scale * credit.high
    title = f"before: {interval(call.before, signed=False)}, after: {interval(call.after, signed=False)}"
    if call.repeated is not None:
        title += f"; {call.repeated:.0%} of the continuations made it again"
    return (
        f'<svg viewBox="0 0 {WIDTH} 20" role="img"><title>{escaped(title)}</title>'
        f'<path d="M{middle} 1V19" style="stroke:var(--line)"/>'
        f'<rect x="{start:.1f}" y="5" width="{max(end - start, 1):.1f}" height="10" style="fill:{colour}"/>'
        f'<path d="M{low:.1f} 10H{high:.1f}M{low:.1f} 7V13M{high:.1f} 7V13" style="stroke:var(--ink)"/></svg>'
        f"<span{'' if call.is_clear else ' class=soft'}>{interval(credit)}</span>"
    )
