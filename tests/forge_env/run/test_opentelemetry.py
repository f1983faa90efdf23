"""Metrics and traces of a run by OTLP, to a collector on this machine."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from forge_env.config import load_config
from forge_env.errors import UsageError
from forge_env.policy import Reply
from forge_env.run import RunFolder
from forge_env.run.metrics import check_loggers, open_loggers
from forge_env.run.opentelemetry import OpenTelemetryLogger
from forge_env.trajectory import Trajectory, Turn
from forge_env.types import Message, call_tool

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="NOT RUN: pip install 'forge-env[opentelemetry]'")


@pytest.fixture
def received(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, Any]]]:
    """Requests to the collector: their path and message."""
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    kinds = {"/v1/metrics": ExportMetricsServiceRequest, "/v1/traces": ExportTraceServiceRequest}
    requests: list[tuple[str, Any]] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            requests.append((self.path, kinds[self.path].FromString(body)))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *args: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Collector) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_address[1]}")
        monkeypatch.setenv("NO_PROXY", "*")
        yield requests
        server.shutdown()


def test_the_newest_values_reach_a_collector(tmp_path: Path, received: list[tuple[str, Any]]) -> None:
    config = load_config("coding_rlvr", ["logging.loggers=[opentelemetry]"])
    check_loggers(config)
    folder = RunFolder(tmp_path / "run-1")
    folder.create()
    *others, logger = open_loggers(config, folder, clock=lambda: 0.0)
    assert isinstance(logger, OpenTelemetryLogger)
    logger.log(1, {"reward/mean": 0.25})
    logger.log(2, {"reward/mean": 0.75, "odd name%": 1.0})
    for each in (*others, logger):
        each.close()
    ((path, message),) = received
    assert path == "/v1/metrics"
    (sent,) = message.resource_metrics
    resource = {entry.key: entry.value.string_value for entry in sent.resource.attributes}
    assert (resource["service.name"], resource["forge_env.run"]) == ("forge-env", "run-1")
    values = {
        metric.name: [point.as_double for point in metric.gauge.data_points]
        for scope in sent.scope_metrics
        for metric in scope.metrics
    }
    assert values == {"forge_env.reward/mean": [0.75], "forge_env.odd_name_": [1.0], "forge_env.step": [2.0]}


def test_a_held_out_episode_is_a_trace(tmp_path: Path, received: list[tuple[str, Any]]) -> None:
    folder = RunFolder(tmp_path / "run-1")
    folder.create()
    logger = OpenTelemetryLogger(folder, load_config("coding_rlvr", []))
    calls = Message(role="assistant", tool_calls=[*call_tool("add", a=1).tool_calls, *call_tool("look").tool_calls])
    turns = [
        Turn([], Reply(calls), generate_s=1.0, step_s=2.0, calls_s=[1.5, 0.5]),
        Turn([], Reply(Message(role="assistant", content="4")), generate_s=0.5),
    ]
    episode = Trajectory(
        id="0", environment="e", task_id="eval-3", turns=turns, reward=1.0, wall_s=4.0, reset_s=0.25, started=1000.0
    )
    logger.log_episodes(7, "eval", [episode])
    logger.close()
    (message,) = (message for path, message in received if path == "/v1/traces")
    ((scope,),) = (sent.scope_spans for sent in message.resource_spans)
    whole, *parts = scope.spans
    assert all(part.parent_span_id == whole.span_id and part.trace_id == whole.trace_id for part in parts)
    placed = [(each.name, each.start_time_unix_nano / 1e9, each.end_time_unix_nano / 1e9) for each in (whole, *parts)]
    assert placed == [
        ("episode eval-3", 1000.0, 1004.0),
        ("chat", 1000.25, 1001.25),
        ("execute_tool add", 1001.25, 1002.75),
        ("execute_tool look", 1001.25, 1001.75),
        ("chat", 1003.25, 1003.75),
    ]
    facts = {entry.key: entry.value for entry in whole.attributes}
    assert (facts["forge_env.reward"].double_value, facts["forge_env.step"].int_value) == (1.0, 7)


def test_a_missing_exporter_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OpenTelemetryLogger, "package", "no_such_package.exporter")
    with pytest.raises(UsageError, match="isn't installed") as caught:
        OpenTelemetryLogger.check()
    assert "forge-env[opentelemetry]" in str(caught.value.fix)
