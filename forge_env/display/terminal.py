"""Showing on a terminal, in a pipe or in a log how a run or an evaluation goes on.

Everything that is shown is a `View`: it can be drawn as one line and as a panel. A display draws it, live if there is
a terminal and in sparse lines elsewhere. Only the caller draws, never a thread: what is drawn changes in the event
loop meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Protocol, TextIO

from forge_env.visible import visible

if TYPE_CHECKING:
    from rich.console import RenderableType

log = logging.getLogger(__name__)
QUIET_S = 15.0
"""Plain lines of progress come at most this often."""
REDRAW_S = 0.25
"""The live panel is drawn at most this often."""


def duration(seconds: float) -> str:
    """`8.3s`, `2m05s`, `1h04m`."""
    if not 60 <= seconds < math.inf:  # also what is no number, in a damaged file
        return f"{seconds:.1f}s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}m{rest:02d}s" if minutes < 60 else f"{minutes // 60}h{minutes % 60:02d}m"


class View(Protocol):
    """What is shown."""

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""

    def line(self) -> str | None:
        """How far it is, in one line; None while there is nothing to say."""

    def panel(self) -> RenderableType:
        """Everything, for rich to draw."""


class PlainDisplay:
    """One line for what matters, with the time since the start in front."""

    def __init__(self, view: View, stream: TextIO) -> None:
        self._view = view
        self._stream = stream
        self._last = 0.0

    def update(self) -> None:
        """The view's line, when none came for a while."""
        if self._view.elapsed - self._last >= QUIET_S and (text := self._view.line()) is not None:
            self.event(text)

    def event(self, text: str) -> None:
        """The text."""
        self._last = self._view.elapsed
        self.note(text)

    def note(self, text: str) -> None:
        """The text."""
        self._stream.write(f"[{duration(self._view.elapsed):>7}] {visible(text)}\n")
        self._stream.flush()

    def close(self) -> None:
        """What was written stays."""


class LiveDisplay:
    """A panel that is drawn again a few times a second; notes scroll by above it."""

    def __init__(self, view: View, stream: TextIO) -> None:
        from rich.console import Console
        from rich.live import Live

        class Plain(Console):
            def on_broken_pipe(self) -> None:  # rich's own ends the program
                raise BrokenPipeError("nobody reads it any more")

        self._view = view
        self._last = -math.inf
        self._live = Live(
            get_renderable=view.panel,
            console=Plain(file=stream, highlight=False, emoji=False),
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
        )

    def update(self) -> None:
        """Draw again, unless that was just done."""
        now = self._view.elapsed
        if now - self._last >= REDRAW_S:
            self._last = now
            self._draw()

    def event(self, text: str) -> None:
        """Draw now: what follows may hold everything up."""
        self._draw()

    def note(self, text: str) -> None:
        """A line above the panel."""
        from rich.markup import escape

        self._live.console.print(f"[dim]{duration(self._view.elapsed):>7}[/] {escape(visible(text))}", soft_wrap=True)

    def close(self) -> None:
        """Draw once more and leave it on the screen."""
        self._live.stop()

    def _draw(self) -> None:
        self._live.start()
        self._live.refresh()


class Display:
    """What a run or an evaluation tells how it goes on: a display that draws for as long as that works, or none.

    A run is worth more than its picture, so it never raises.
    """

    def __init__(self, drawn: PlainDisplay | LiveDisplay | None = None) -> None:
        self._drawn = drawn

    def update(self) -> None:
        """Something has changed, or nothing for a while. Displays draw no more often than they like."""
        self._try(lambda drawn: drawn.update())

    def event(self, text: str) -> None:
        """Something that the panel shows as well: a line where there is no panel."""
        self._try(lambda drawn: drawn.event(text))

    def note(self, text: str) -> None:
        """Something worth a line."""
        self._try(lambda drawn: drawn.note(text))

    def close(self) -> None:
        """End, leaving the last state on the screen."""
        self._try(lambda drawn: drawn.close())

    def _try(self, draw: Callable[[PlainDisplay | LiveDisplay], object]) -> None:
        if (drawn := self._drawn) is None:
            return
        try:
            draw(drawn)
        except Exception as error:  # whatever drawing raises (a reader gone, rich): the run goes on
            self._drawn = None
            own = None if isinstance(error, OSError) else error
            log.warning("progress is no longer drawn: %s: %s", type(error).__name__, error, exc_info=own)
            with suppress(Exception):  # gives the cursor back, if that still works
                drawn.close()


def open_display(view: View, stream: TextIO, *, live: bool = True) -> Display:
    """The display that fits the stream, begun: live on a terminal, if `live` allows it."""
    display = Display(LiveDisplay(view, stream) if live and stream.isatty() else PlainDisplay(view, stream))
    display.update()
    return display


@asynccontextmanager
async def kept_up_to_date(display: Display) -> AsyncIterator[None]:
    """Show during the block how time goes on, also while nothing happens."""

    async def tick() -> None:
        while True:
            await asyncio.sleep(REDRAW_S)
            display.update()

    ticking = asyncio.create_task(tick())
    try:
        yield
    finally:
        ticking.cancel()
