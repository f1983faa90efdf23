"""`coding_rlvr` whose programs take a while: tools that wait for something, as most tools outside a benchmark do."""

from __future__ import annotations

import asyncio

from environments.coding_rlvr.checks import Check
from environments.coding_rlvr.environment import CodingRLVR, CodingRLVRConfig
from forge_env.sandbox import CallsResult


class SlowToolsConfig(CodingRLVRConfig):
    """`coding_rlvr`'s options and the wait."""

    tool_latency_s: float = 1.0
    """Seconds that every run of a program takes besides its own time."""


class SlowTools(CodingRLVR):
    """Every run of a program, the scoring one included, waits first."""

    config_class = SlowToolsConfig
    config: SlowToolsConfig

    async def _run(self, code: str, tests: list[Check]) -> CallsResult:
        await asyncio.sleep(self.config.tool_latency_s)
        return await super()._run(code, tests)
