"""`coding_rlvr` with slow programs: its tools wait, as most real tools wait for something."""

from __future__ import annotations

import asyncio

from environments.coding_rlvr.checks import Check
from environments.coding_rlvr.environment import CodingRLVR, CodingRLVRConfig
from forge_env.sandbox import CallsResult


class SlowToolsConfig(CodingRLVRConfig):
    """Options of `coding_rlvr`, and the delay."""

    tool_latency_s: float = 1.0
    """Seconds added to every run of a program."""


class SlowTools(CodingRLVR):
    """`coding_rlvr` with a delay before every run of a program, including those for scoring."""

    config_class = SlowToolsConfig
    config: SlowToolsConfig

    async def _run(self, code: str, tests: list[Check]) -> CallsResult:
        await asyncio.sleep(self.config.tool_latency_s)
        return await super()._run(code, tests)
