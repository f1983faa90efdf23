"""`/metrics` of a server of environments, in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from starlette.requests import Request
from starlette.responses import Response

from forge_env.serve.sessions import Sessions


class Metrics:
    """The figures of a server."""

    def __init__(self, name: str, sessions: Sessions) -> None:
        self._name = name
        self._sessions = sessions
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def collect(self) -> Iterator[Any]:
        """Yield the figures, for `prometheus_client`."""
        sessions = self._sessions
        for kind, name, text, value in (
            (GaugeMetricFamily, "forge_env_sessions", "open sessions", len(sessions)),
            (GaugeMetricFamily, "forge_env_sessions_limit", "most open sessions", sessions.limits.max_sessions),
            (CounterMetricFamily, "forge_env_episodes", "episodes begun", sessions.counts["reset"]),
            (CounterMetricFamily, "forge_env_steps", "steps taken", sessions.counts["step"]),
            (CounterMetricFamily, "forge_env_failures", "resets and steps that failed", sessions.counts["failed"]),
        ):
            family = kind(name, text, labels=["environment"])
            family.add_metric([self._name], value)
            yield family

    async def answer(self, request: Request) -> Response:
        """Answer a request for `/metrics`."""
        return Response(generate_latest(self._registry), headers={"Content-Type": CONTENT_TYPE_LATEST})
