"""How a model behind an endpoint is asked: the keys that flags, YAML files and Python share."""

from __future__ import annotations

import os
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from forge_env.errors import UsageError
from forge_env.policies.endpoint_http import address

LOCAL = "http://localhost:8000/v1"


class EndpointOptions(BaseModel):
    """How an endpoint is asked."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    model: str
    """The model's name at the endpoint."""
    base_url: str = Field(default_factory=lambda: os.environ.get("OPENAI_BASE_URL", LOCAL))
    """Address, up to and including `/v1`; else OPENAI_BASE_URL, else a server on this machine at port 8000."""
    uds: str | None = None
    """Unix socket to connect to instead of the address's host."""
    api_key_env: str = "OPENAI_API_KEY"
    """Environment variable that holds the key; none is sent when it is not set."""
    tools: Literal["native", "text"] = "native"
    """`native`: the endpoint's own tool calls; `text`: described in the system message, parsed from text."""
    stream: bool = False
    """Ask for server-sent events: keeps proxies from closing a connection that is silent for minutes."""
    exact_tokens: bool | None = None
    """Ask for token ids and log-probs as vLLM gives them; None asks where the endpoint says it is vLLM."""
    temperature: float | None = Field(None, ge=0)
    """Sampling temperature; the endpoint's default when not given."""
    top_p: float | None = Field(None, gt=0, le=1)
    """Nucleus sampling; the endpoint's default when not given."""
    max_tokens: int | None = Field(None, ge=1)
    """Tokens of one reply; the endpoint's default when not given."""
    send_seed: bool = False
    """Send every sample's own seed."""
    extra: dict[str, Any] = Field(default_factory=dict)
    """More fields of the request, as they are."""
    timeout_s: float = Field(600.0, gt=0)
    """Seconds until an answer must be complete."""
    retries: int = Field(6, ge=0)
    """Times a request is asked again after a passing failure."""
    first_delay_s: float = Field(0.5, ge=0)
    """Delay before the first of them; doubled each time, varied by half to either side."""
    longest_delay_s: float = Field(60.0, ge=0)
    """Bound on that delay before it is varied."""
    concurrency: int = Field(256, ge=1)
    """Most requests in flight."""
    start_concurrency: int = Field(16, ge=1)
    """Requests in flight before anything is known of the endpoint."""

    @field_validator("base_url")
    @classmethod
    def _address(cls, value: str) -> str:
        try:
            address(value)
        except UsageError as error:
            raise ValueError(str(error)) from error
        return value
