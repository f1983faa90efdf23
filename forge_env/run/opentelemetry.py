"""The metrics of a run to a collector of OpenTelemetry, by OTLP over HTTP."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from forge_env.config.recipe import RunConfig
from forge_env.run.folder import RunFolder
from forge_env.run.trackers import Tracker

LAST_SEND_MS = 5_000.0
"""Milliseconds that the end of a run waits for a collector."""


class OpenTelemetryLogger(Tracker):
    """Sends the newest value of every metric, in the background, to the collector of OpenTelemetry's own variables."""

    package = "opentelemetry.exporter.otlp.proto.http"
    install = "pip install 'forge-env[opentelemetry]'"

    def __init__(self, folder: RunFolder, config: RunConfig) -> None:
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
        from opentelemetry.sdk.resources import Resource

        service = os.environ.get("OTEL_SERVICE_NAME") or "forge-env"
        names = {"service.name": service, "forge_env.run": folder.name, "forge_env.method": config.method}
        reader = PeriodicExportingMetricReader(OTLPMetricExporter())
        self._provider = MeterProvider([reader], Resource.create(names), shutdown_on_exit=False)
        self._meter = self._provider.get_meter("forge_env")
        self._gauges: dict[str, Any] = {}

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record one row."""
        for name, value in {**metrics, "step": float(step)}.items():
            gauge = "forge_env." + re.sub(r"[^A-Za-z0-9_./-]", "_", name)[:200]
            if gauge not in self._gauges:
                self._gauges[gauge] = self._meter.create_gauge(gauge)
            self._gauges[gauge].set(value)

    def close(self, exit: str = "success") -> None:
        """Finish the run."""
        self._provider.shutdown(timeout_millis=LAST_SEND_MS)
