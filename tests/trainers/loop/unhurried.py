"""The default recipe's tasks at leisure: a run that goes on while another one starts leaves that one the cores."""

from __future__ import annotations

import asyncio
from typing import Any

from environments.coding_rlvr import CodingRLVR
from forge_env.types import Observation

PAUSE_S = 2.0
"""Before each episode."""


class Programs(CodingRLVR):
    """Programs to write, the next one only after a while."""

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        await asyncio.sleep(PAUSE_S)
        return await super().reset(seed=seed, options=options)
