"""Plain, sparse lines for logs, pipes and CI."""

from __future__ import annotations

from typing import TextIO

from forge_env.display.state import Display, Evaluation, RunState, Stage, duration

QUIET_S = 15.0
"""Progress is shown at most this often."""


def score_text(state: RunState) -> list[str]:
    """Reward and held-out score in words, where known."""
    status = state.status
    parts: list[str] = []
    reward = status.get("reward", state.rewards[-1] if state.rewards else None)
    if reward is not None:
        parts.append(f"reward {float(reward):.3f}")
    if state.scores():
        parts.append(f"held-out {state.scores()[-1].score:.3f}")
    return parts


def status_text(state: RunState) -> list[str]:
    """The other live figures in words, in a fixed order, only those that are known."""
    status = state.status
    parts: list[str] = []
    if (staleness := status.get("staleness")) is not None:
        bound = "" if state.max_staleness is None else f"/{state.max_staleness}"
        parts.append(f"staleness {staleness:g}{bound}")
    if (rate := status.get("tokens_per_s")) is not None:
        parts.append(f"{float(rate):,.0f} tokens/s")
    if (flying := status.get("in_flight")) is not None:
        parts.append(f"{flying} in flight")
    if (buffered := status.get("buffer")) is not None:
        parts.append(f"buffer {buffered}")
    return parts


def waiting_text(state: RunState) -> str:
    """Who waits for what, or an empty string."""
    waiting = state.status.get("waiting") or {}
    return ", ".join(f"{who} waits for {what}" for who, what in waiting.items() if what)


def field_text(state: RunState) -> list[str]:
    """The figures that came with `Run.progress`."""
    return [f"{name} {_figure(value)}" for name, value in state.progress_fields.items()]


def _figure(value: object) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


class PlainDisplay(Display):
    """One line for what matters, with the time since the start in front."""

    def __init__(self, state: RunState, stream: TextIO) -> None:
        self._state = state
        self._stream = stream
        self._last = float("-inf")

    def _line(self, text: str) -> None:
        self._stream.write(f"[{duration(self._state.elapsed):>7}] {text}\n")
        self._stream.flush()

    def stage(self, stage: Stage) -> None:
        """A line for the stage that begins."""
        self._line(f"{stage.name}: {stage.detail}" if stage.detail else stage.name)
        self._last = self._state.elapsed

    def progress(self) -> None:
        """A line when none came for a while."""
        if self._state.elapsed - self._last < QUIET_S or not self._state.total:
            return
        self._last = self._state.elapsed
        state = self._state
        parts = [*field_text(state), *score_text(state), *status_text(state)]
        if waiting := waiting_text(state):
            parts.append(waiting)
        if (eta := state.eta_s) is not None:
            parts.append(f"{duration(eta)} left")
        name = state.stage.name if state.stage else "run"
        self._line("  ".join([f"{name} {state.done}/{state.total}", *parts]))

    def step(self) -> None:
        """The same line."""
        self.progress()

    def evaluation(self, evaluation: Evaluation) -> None:
        """A line for every score."""
        self._line(
            f"held-out ({evaluation.split}) after step {evaluation.step}: "
            f"{evaluation.score:.3f} +- {evaluation.stderr:.3f} (n={evaluation.n})"
        )

    def note(self, text: str) -> None:
        """The text."""
        self._line(text)

    def warning(self, text: str) -> None:
        """The text, marked."""
        self._line(f"warning: {text}")
