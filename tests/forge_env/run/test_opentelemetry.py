"""The metrics of a run by OTLP, to a collector on this machine."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from forge_env.config import load_config
from forge_env.errors import UsageError
from forge_env.run import RunFolder
from forge_env.run.metrics import check_loggers, open_loggers
from forge_env.run.opentelemetry import OpenTelemetryLogger

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="NOT RUN: pip install 'forge-env[opentelemetry]'")


@pytest.fixture
def received(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, Any]]]:
    """Requests to the collector: their path and message."""
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

    requests: list[tuple[str, Any]] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            requests.append((self.path, ExportMetricsServiceRequest.FromString(body)))
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


def test_a_missing_exporter_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OpenTelemetryLogger, "package", "no_such_package.exporter")
    with pytest.raises(UsageError, match="isn't installed") as caught:
        OpenTelemetryLogger.check()
    assert "forge-env[opentelemetry]" in str(caught.value.fix)
