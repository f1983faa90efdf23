"""What `forge-env serve` may be told: the same keys as flags of the command and in Python."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from forge_env.config.recipe import Positive, Section


class ServeLimits(Section):
    """Limits of the server."""

    max_sessions: Positive = 64
    """Maximum episodes at once."""
    step_timeout: Annotated[float, Field(gt=0)] = 300.0
    """Seconds that a reset or a step may take; after that, the episode is given up."""
    idle_timeout: Annotated[float, Field(gt=0)] = 1800.0
    """Seconds without a request after which a connection is closed, and its session with it."""
    reconnect: Annotated[float, Field(ge=0)] = 60.0
    """Seconds in which a client may reconnect to its session."""


class ServeConfig(ServeLimits):
    """The server."""

    host: str = "127.0.0.1"
    """Address to listen on; 127.0.0.1: only programs of this machine reach it."""
    port: Annotated[int, Field(ge=0, lt=2**16)] = 8000
    """Port to listen on; 0: a free one."""
