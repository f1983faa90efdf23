"""The newest metrics of a run at `/metrics`, in Prometheus' text format."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

from forge_env.config.recipe import RunConfig
from forge_env.errors import UsageError
from forge_env.run.folder import RunFolder
from forge_env.run.trackers import Tracker

ADDRESS = "FORGE_ENV_METRICS"
"""Environment variable with the address to listen at, `HOST:PORT` or a port of 127.0.0.1."""
DEFAULT = "127.0.0.1:9464"
"""The address otherwise; the port is that of OpenTelemetry's exporter for Prometheus."""


class PrometheusLogger(Tracker):
    """A page that Prometheus, or a collector of OpenTelemetry, reads while the run lasts."""

    package = "prometheus_client"
    install = "pip install 'forge-env[prometheus]'"

    def __init__(self, folder: RunFolder, config: RunConfig) -> None:
        from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server

        self._run = folder.name
        self._newest: dict[str, float] = {}
        registry = CollectorRegistry()
        registry.register(self)
        ProcessCollector(registry=registry)
        host, port = address()
        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except OSError as error:
            fix = f"set {ADDRESS}=HOST:PORT to an address that is free"
            raise UsageError(f"can't serve metrics at {host}:{port}: {error.strerror}", fix=fix) from error
        self.port: int = self._server.server_port

    @classmethod
    def check(cls) -> None:
        """Raise `UsageError` if prometheus_client isn't installed, or the address is none."""
        super().check()
        address()

    def collect(self) -> Iterator[Any]:
        """Yield the newest value of every metric, for `prometheus_client`."""
        from prometheus_client.core import GaugeMetricFamily

        families: dict[str, Any] = {}
        for name, value in self._newest.items():
            family = "forge_env_" + re.sub(r"[^A-Za-z0-9]+", "_", name).strip("_")
            if family not in families:
                families[family] = GaugeMetricFamily(family, f"{name} of a run", labels=["run", "metric"])
            families[family].add_metric([self._run, name], value)
        yield from families.values()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record one row."""
        self._newest = {**self._newest, **metrics, "step": float(step)}  # a new one: another thread reads it

    def close(self, exit: str = "success") -> None:
        """Finish the run."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def address() -> tuple[str, int]:
    """Host and port at which metrics are served.

    Raises:
        UsageError: the environment variable is not an address.
    """
    given = os.environ.get(ADDRESS) or DEFAULT
    host, _, port = given.rpartition(":")
    if not (port.isdecimal() and int(port) < 2**16):
        raise UsageError(f"{ADDRESS}={given!r} is not an address", fix="set HOST:PORT, such as 0.0.0.0:9464")
    return host.strip("[]") or "127.0.0.1", int(port)
