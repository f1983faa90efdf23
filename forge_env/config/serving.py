"""Settings of `forge-env serve`: the same keys as flags of the command and in Python."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from forge_env.config.recipe import Positive, Section


class ServeLimits(Section):
    """Limits of the server."""

    max_sessions: Positive = 64
    """Maximum episodes at once."""
    step_timeout: Annotated[float, Field(gt=0)] = 300.0
    """Maximum seconds of one reset or step; an episode that exceeds them is abandoned."""
    idle_timeout: Annotated[float, Field(gt=0)] = 1800.0
    """Seconds without a request after which a connection and its session are closed."""
    reconnect: Annotated[float, Field(ge=0)] = 60.0
    """Seconds after a lost connection within which a client may reconnect to its session."""


class ServeConfig(ServeLimits):
    """The server."""

    host: str = "127.0.0.1"
    """Address to listen on; 127.0.0.1 accepts only connections from this machine."""
    port: Annotated[int, Field(ge=0, lt=2**16)] = 8000
    """Port to listen on; 0: a free one."""
