"""Metrics of a run, and traces of held-out episodes, to a collector of OpenTelemetry, by OTLP over HTTP."""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from forge_env.config.recipe import RunConfig
from forge_env.run.folder import RunFolder
from forge_env.run.trackers import Tracker, shown_message, summary_of

if TYPE_CHECKING:
    from opentelemetry.trace import Span

    from forge_env.trajectory import Trajectory

LAST_SEND_MS = 5_000.0
"""Milliseconds that the end of a run waits for a collector."""


class OpenTelemetryLogger(Tracker):
    """Sends the newest value of every metric, in the background, to the collector of OpenTelemetry's own variables.

    A held-out episode is a trace: a span for the episode, and below it one for each answer of the model and each tool
    call, with the attributes of OpenTelemetry's conventions for generative AI.
    """

    package = "opentelemetry.exporter.otlp.proto.http"
    install = "pip install 'forge-env[opentelemetry]'"

    def __init__(self, folder: RunFolder, config: RunConfig) -> None:
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        service = os.environ.get("OTEL_SERVICE_NAME") or "forge-env"
        names = {"service.name": service, "forge_env.run": folder.name, "forge_env.method": config.method}
        reader = PeriodicExportingMetricReader(OTLPMetricExporter())
        resource = Resource.create(names)
        self._provider = MeterProvider([reader], resource, shutdown_on_exit=False)
        self._meter = self._provider.get_meter("forge_env")
        self._spans = BatchSpanProcessor(OTLPSpanExporter())
        tracers = TracerProvider(resource=resource, shutdown_on_exit=False)
        tracers.add_span_processor(self._spans)
        self._tracer = tracers.get_tracer("forge_env")
        self._gauges: dict[str, Any] = {}

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record one row."""
        for name, value in {**metrics, "step": float(step)}.items():
            gauge = "forge_env." + re.sub(r"[^A-Za-z0-9_./-]", "_", name)[:200]
            if gauge not in self._gauges:
                self._gauges[gauge] = self._meter.create_gauge(gauge)
            self._gauges[gauge].set(value)

    def log_episodes(self, step: int, split: str, episodes: Sequence[Trajectory]) -> None:
        """Record episodes of the evaluation of `split` after training step `step`."""
        for episode in episodes if os.environ.get("OTEL_TRACES_EXPORTER") != "none" else ():
            self._trace(step, split, episode)

    def _trace(self, step: int, split: str, episode: Trajectory) -> None:
        """Send an episode; the record has durations, so its turns are placed one after the other."""
        facts = {f"forge_env.{name}": value for name, value in summary_of(episode).items()}
        facts |= {"gen_ai.operation.name": "invoke_agent", "forge_env.step": step, "forge_env.split": split}
        whole = self._span(f"episode {episode.task_id}", episode.started, episode.wall_s, facts)
        at = episode.started + episode.reset_s
        for turn in episode.turns:
            reply = {
                "gen_ai.operation.name": "chat",
                "gen_ai.usage.input_tokens": turn.reply.prompt_length,
                "gen_ai.usage.output_tokens": len(turn.reply.token_ids),
                "gen_ai.output.messages": json.dumps([shown_message(turn.message)]),
            }
            self._span("chat", at, turn.generate_s, reply, whole)
            at += turn.generate_s
            for call, seconds in zip(turn.message.tool_calls, turn.calls_s, strict=False):
                name = call.function.name
                called = {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": name}
                self._span(f"execute_tool {name}", at, seconds, called, whole)
            at += turn.step_s

    def _span(
        self, name: str, at: float, seconds: float, attributes: Mapping[str, Any], parent: Span | None = None
    ) -> Span:
        from opentelemetry.context import Context
        from opentelemetry.trace import set_span_in_context

        context = Context() if parent is None else set_span_in_context(parent, Context())
        span = self._tracer.start_span(name, context, attributes=attributes, start_time=int(1e9 * at))
        span.end(int(1e9 * (at + seconds)))
        return span

    def close(self, exit: str = "success") -> None:
        """Finish the run."""
        sending = threading.Thread(target=self._spans.shutdown, daemon=True)  # has no time limit of its own
        sending.start()
        try:
            self._provider.shutdown(timeout_millis=LAST_SEND_MS)
        finally:
            sending.join(LAST_SEND_MS / 1_000)
