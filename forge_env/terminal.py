"""Progress of a run or an evaluation on a terminal, in a pipe or in a log.

Everything that is shown is a `View`: it can be drawn as one line and as a panel. A display draws it, live on a terminal
and in sparse lines elsewhere. Drawing is done by the caller, never by a thread, since the view changes in the event
loop at the same time.
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
"""Minimum seconds between plain lines of progress."""
REDRAW_S = 0.25
"""Minimum seconds between redraws of the live panel."""


def duration(seconds: float) -> str:
    """Format a duration: `8.3s`, `2m05s`, `1h04m`."""
    if not 60 <= seconds < math.inf:  # also NaN, from a damaged file
        return f"{seconds:.1f}s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}m{rest:02d}s" if minutes < 60 else f"{minutes // 60}h{minutes % 60:02d}m"


class View(Protocol):
    """The content of a display."""

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""

    def line(self) -> str | None:
        """Return the progress in one line; None while there is nothing to report."""

    def panel(self) -> RenderableType:
        """Return the whole view as a rich renderable."""


class PlainDisplay:
    """Plain lines for important events, each with the time since the start in front."""

    def __init__(self, view: View, stream: TextIO) -> None:
        self._view = view
        self._stream = stream
        self._last = 0.0

    def update(self) -> None:
        """Write the view's line, unless another line was written recently."""
        if self._view.elapsed - self._last >= QUIET_S and (text := self._view.line()) is not None:
            self.event(text)

    def event(self, text: str) -> None:
        """Write the text."""
        self._last = self._view.elapsed
        self.note(text)

    def note(self, text: str) -> None:
        """Write the text."""
        self._stream.write(f"[{duration(self._view.elapsed):>7}] {visible(text)}\n")
        self._stream.flush()

    def close(self) -> None:
        """Do nothing; written lines stay."""


class LiveDisplay:
    """A panel that is redrawn a few times a second; notes scroll by above it."""

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
        """Redraw, unless that was just done."""
        now = self._view.elapsed
        if now - self._last >= REDRAW_S:
            self._last = now
            self._draw()

    def event(self, text: str) -> None:
        """Redraw now: the work that follows may block the event loop."""
        self._draw()

    def note(self, text: str) -> None:
        """Print a line above the panel."""
        from rich.markup import escape

        self._live.console.print(f"[dim]{duration(self._view.elapsed):>7}[/] {escape(visible(text))}", soft_wrap=True)

    def close(self) -> None:
        """Redraw once more and leave the panel on the screen."""
        self._live.stop()

    def _draw(self) -> None:
        self._live.start()
        self._live.refresh()


class Display:
    """Display of a run or an evaluation that draws until drawing fails; without `drawn`, it draws nothing.

    A run is worth more than its picture, so it never raises.
    """

    def __init__(self, drawn: PlainDisplay | LiveDisplay | None = None) -> None:
        self._drawn = drawn

    def update(self) -> None:
        """Redraw after a change, or at regular intervals; displays limit how often they redraw."""
        self._try(lambda drawn: drawn.update())

    def event(self, text: str) -> None:
        """Show an event that the panel shows as well: a line if there is no panel."""
        self._try(lambda drawn: drawn.event(text))

    def note(self, text: str) -> None:
        """Show a note: a line on every display."""
        self._try(lambda drawn: drawn.note(text))

    def close(self) -> None:
        """End, leaving the last state on the screen."""
        self._try(lambda drawn: drawn.close())

    def _try(self, draw: Callable[[PlainDisplay | LiveDisplay], object]) -> None:
        if (drawn := self._drawn) is None:
            return
        try:
            draw(drawn)
        except Exception as error:  # drawing errors (a closed pipe, rich) must not end the run
            self._drawn = None
            shown = None if isinstance(error, OSError) else error
            log.warning("progress is no longer drawn: %s: %s", type(error).__name__, error, exc_info=shown)
            with suppress(Exception):  # restores the cursor, if that still works
                drawn.close()


def open_display(view: View, stream: TextIO, *, live: bool = True) -> Display:
    """Open the display that fits the stream: live on a terminal if `live` allows it, else plain."""
    display = Display(LiveDisplay(view, stream) if live and stream.isatty() else PlainDisplay(view, stream))
    display.update()
    return display


@asynccontextmanager
async def kept_up_to_date(display: Display) -> AsyncIterator[None]:
    """Update the display regularly during the block, also while nothing happens."""

    async def tick() -> None:
        while True:
            await asyncio.sleep(REDRAW_S)
            display.update()

    ticking = asyncio.create_task(tick())
    try:
        yield
    finally:
        ticking.cancel()
