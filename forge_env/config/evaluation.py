"""Settings of an evaluation: the same keys in a YAML file, as flags of `forge-env eval`, and in Python.

A field's docstring is its documentation, and a class's is the title of its flags in `forge-env eval --help`.
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from forge_env.config.recipe import Section
from forge_env.errors import UsageError
from forge_env.machine import user_path
from forge_env.plugins import ENVIRONMENTS, is_registered
from forge_env.redaction import KEYLIKE, learn_address, redact
from forge_env.types import Text

if TYPE_CHECKING:
    import httpx2

_VARIABLE = re.compile(r"[A-Za-z_]\w*")
LOCAL = "http://localhost:8000/v1"
CONFIDENCE = 0.95
"""Default confidence level of intervals."""
ENDLESS_N = 100
"""Tasks taken from an environment with unlimited tasks, when no number is given."""
FREE_TO_CHANGE = {
    *("num_tasks", "epochs", "budget", "prices", "confidence", "success", "score", "out", "max_samples"),
    *("sandbox", "docker_host", "sandbox_options"),
    *("base_url", "uds", "api_key_env", "timeout_s", "retries", "first_delay_s", "longest_delay_s", "vllm_args"),
    *("concurrency", "start_concurrency", "sample_retries", "max_failures", "max_bug_rate", "stream"),
}
"""Keys that may differ when a run is resumed, because they don't change the meaning of a sample."""


class EndpointOptions(Section):
    """Model and endpoint."""

    model: str
    """Name of the endpoint's model; `vllm:PATH`, a checkpoint that is served for the run; or a policy: `gold` (the \
reference solutions), `random`, `empty`, `module:function`."""
    base_url: str = Field(default_factory=lambda: os.environ.get("OPENAI_BASE_URL", LOCAL))
    """Address of the endpoint, up to and including `/v1`; unset: OPENAI_BASE_URL, else port 8000 of this machine."""
    uds: str | None = None
    """Unix socket to connect to, instead of the host of `base_url`."""
    api_key_env: str = "OPENAI_API_KEY"
    """Name of the environment variable that holds the API key; if it is not set, no key is sent."""
    tools: Literal["native", "text"] = "native"
    """`native`: the endpoint's own tool calls; `text`: tools are described in the prompt, calls read from the reply."""
    stream: bool = False
    """Use server-sent events, so that proxies don't close a connection that sends nothing for minutes."""
    exact_tokens: bool | None = None
    """Ask for token ids and log-probs as vLLM returns them; unset: only if the endpoint reports that it is vLLM."""
    temperature: float | None = Field(None, ge=0, allow_inf_nan=False)
    """Sampling temperature; unset: the endpoint's default."""
    top_p: float | None = Field(None, gt=0, le=1)
    """Nucleus sampling; unset: the endpoint's default."""
    max_tokens: int | None = Field(None, ge=1)
    """Maximum tokens of one reply; unset: the endpoint's default."""
    send_seed: bool = False
    """Send each sample's seed to the endpoint."""
    extra: dict[str, Any] = Field(default_factory=dict)
    """Further fields of the request, sent unchanged: `{top_k: 4}`, or `extra.top_k=4`."""
    timeout_s: float = Field(600.0, gt=0)
    """Maximum seconds until an answer is complete."""
    retries: int = Field(6, ge=0)
    """How often a request is retried after a temporary failure."""
    first_delay_s: float = Field(0.5, ge=0)
    """Seconds before the first retry; doubled each time, and varied randomly by up to half."""
    longest_delay_s: float = Field(60.0, ge=0)
    """Longest delay between retries in seconds, before it is varied; an endpoint's `Retry-After` is obeyed up to it."""
    concurrency: int = Field(256, ge=1)
    """Maximum requests in flight; the actual number adapts to the endpoint."""
    start_concurrency: int = Field(16, ge=1)
    """Requests in flight at the start, before anything is known about the endpoint."""

    @field_validator("api_key_env")
    @classmethod
    def _variable(cls, value: str) -> str:
        if value and (not _VARIABLE.fullmatch(value) or (KEYLIKE.fullmatch(value) and value not in os.environ)):
            raise ValueError("should be the name of an environment variable; its value is the key")
        return value

    @field_validator("base_url")
    @classmethod
    def _address(cls, value: str) -> str:
        try:
            endpoint_url(value)
        except UsageError as error:
            raise ValueError(str(error)) from error
        return value


class SampleOptions(Section):
    """Samples."""

    num_tasks: int | None = Field(None, ge=1)
    """Tasks of each environment, from its first; unset: all (100 if the environment has unlimited tasks)."""
    epochs: int = Field(1, ge=1)
    """Samples of each task."""
    split: Text | None = None
    """Split to take tasks from; unset: `eval` if the environment has it, else its first split."""
    opponents: dict[str, str | dict[str, Any]] = Field(default_factory=dict)
    """Seat -> opponent that plays it instead of the model: `random`, `module:function`, or \
`{model: NAME, base_url: URL}`; unset: the model plays all seats."""
    seed: int = 0
    """Base seed; the seed of every sample is derived from it."""
    sandbox: str = "auto"
    """Sandbox engine: `auto`, `docker`, `local`, `kubernetes`, `e2b`, or another installed one."""
    docker_host: str | None = None
    """Docker daemon of another machine, `tcp://HOST:PORT` or `ssh://[USER@]HOST[:PORT]`; unset: DOCKER_HOST, else \
this machine's."""
    sandbox_options: dict[str, Any] = Field(default_factory=dict)
    """Further options of the sandbox engine, such as `{base_image: python:3.12-slim}`."""
    max_samples: int | None = Field(None, ge=1)
    """Maximum samples in progress at once; unset: twice `concurrency`."""
    sample_retries: int = Field(1, ge=0)
    """How often a sample is retried after an infrastructure failure; retries of requests are not counted."""
    max_failures: int = Field(20, ge=1)
    """The run ends after this many lost samples in a row."""
    max_bug_rate: float = Field(0.2, ge=0, le=1)
    """The run ends if the environment's own code fails on more than this share of the last 100 samples (20 or more)."""


class LimitOptions(Section):
    """Limits."""

    turn_limit: int | None = Field(None, ge=1)
    """Maximum assistant messages of a sample; the environment's own limit applies as well."""
    token_limit: int | None = Field(None, ge=1)
    """Maximum tokens that the model may write in a sample."""
    time_limit: float | None = Field(None, gt=0)
    """Maximum wall-clock seconds of a sample."""
    working_limit: float | None = Field(None, gt=0)
    """Maximum seconds of a sample, not counting waits for rate limits and free sandboxes."""
    tool_call_limit: int | None = Field(None, ge=0)
    """Maximum tool calls of a sample."""
    cost_limit: float | None = Field(None, gt=0)
    """Maximum cost of a sample, in the unit of `prices`."""
    budget: float | None = Field(None, gt=0)
    """Maximum cost of the whole run, resumed parts included. When it is reached the run stops; resume it with more."""
    prices: Path | None = None
    """YAML file of prices: model -> {input, output, cached_input} per million tokens."""


class FigureOptions(Section):
    """Results."""

    score: str = "reward"
    """The reported score: `reward`, or the name of one of the environment's metrics."""
    success: float | None = None
    """Minimum score of a sample that counts as solved; unset: the score of a perfect episode."""
    confidence: float = Field(CONFIDENCE, gt=0, lt=1)
    """Confidence level of every interval."""


class EnvironmentChoice(Section):
    """One environment to evaluate on."""

    name: str
    """Registered name, or import path `module:Class`."""
    label: str = ""
    """Its name in the results; unset: the registered name, or the name of the class."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the environment."""
    split: Text | None = None
    """Its split, if different from the evaluation's `split`."""
    num_tasks: int | None = Field(None, ge=1)
    """Its number of tasks, if different from the evaluation's `num_tasks`."""
    opponents: dict[str, str | dict[str, Any]] | None = None
    """Its opponents, if different from the evaluation's `opponents`."""

    @model_validator(mode="after")
    def _label(self) -> Self:
        self.label = self.label or short_name(self.name)
        return self


class EvaluationConfig(FigureOptions, LimitOptions, SampleOptions, EndpointOptions):
    """The evaluation."""

    environments: list[EnvironmentChoice] = Field(min_length=1)
    """Environments to evaluate on: names, or mappings of `name`, `label`, `options`, `split`, `num_tasks` and \
`opponents`."""
    out: Path | None = None
    """Folder for the results; unset: a new one in runs/."""
    vllm_args: list[str] = Field(default_factory=list)
    """Further arguments of `vllm serve`, for `model: vllm:PATH`."""

    @field_validator("vllm_args")
    @classmethod
    def _no_keys(cls, value: list[str]) -> list[str]:
        for argument in value:  # every user of the machine can read the arguments of its processes
            if (flag := argument.partition("=")[0]) in ("--api-key", "--hf-token"):
                raise ValueError(f"{flag} is not accepted: the server needs no key, and reads HF_TOKEN for the hub")
        return value

    @field_validator("environments", mode="before")
    @classmethod
    def _names(cls, value: Any) -> Any:
        return environment_entries(value)

    @field_validator("out", "prices", mode="after")
    @classmethod
    def _home(cls, value: Path | None) -> Path | None:
        return None if value is None else user_path(str(value))

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        labels = [choice.label for choice in self.environments]
        for choice in self.environments:  # classes with the same name in two modules
            if labels.count(choice.label) > 1 and choice.label == short_name(choice.name):
                choice.label = choice.name
        labels = [choice.label for choice in self.environments]
        if repeated := {label for label in labels if labels.count(label) > 1}:
            raise ValueError(f"two environments are labelled {sorted(repeated)[0]!r}; give one another `label`")
        for name in ("budget", "cost_limit"):
            if getattr(self, name) is not None and self.prices is None:
                raise ValueError(f"`{name}` needs `prices`")
        return self


def endpoint_url(base_url: str) -> httpx2.URL:
    """Parse an endpoint's address into a URL to which paths can be joined. Path parts that look like keys are redacted.

    Raises:
        UsageError: it isn't an address, or it has parts that would not be sent. These may be secret, so the message
            does not show them.
    """
    import httpx2  # takes a tenth of a second

    learn_address(base_url, "base_url", path=True)
    try:
        url = httpx2.URL(base_url.strip().rstrip("/") + "/")
    except httpx2.InvalidURL as error:
        if "@" in base_url:  # the error message would show part of a password
            raise _unsent("the address", "a name or password") from None
        raise UsageError(f"{redact(base_url)!r} is not the address of an endpoint: {redact(str(error))}") from error
    if "@" in base_url:
        raise _unsent(f"the address of {url.host}" if url.userinfo else "the address", "a name or password")
    if url.scheme not in ("http", "https") or not url.host:
        match = re.fullmatch(r"([\w.-]+(?::\d+)?)(/[^?#]*)?(?:[?#].*)?", base_url.strip())
        hint = (
            f"did you mean http://{match[1]}{match[2] or '/v1'}?" if match else "for example http://localhost:8000/v1"
        )
        raise UsageError(f"{redact(base_url)!r} is not the address of an endpoint", fix=redact(hint))
    if url.port is not None and url.port > 65_535:
        raise UsageError(f"the address of {url.host} has port {url.port}", fix="use a port from 1 to 65535")
    if url.query or url.fragment:
        raise _unsent(f"the address of {url.host}", "a query" if url.query else "a fragment")
    return url


def _unsent(address: str, part: str) -> UsageError:
    return UsageError(
        f"{address} contains {part}, which would not be sent",
        fix="leave it out of the address; an API key goes into the environment variable named by api_key_env",
    )


def short_name(name: str) -> str:
    """Short label of an environment's name.

    The class of `module:Class`, the file stem of the value in `NAME:VALUE`, or else the registered name.
    """
    head, _, value = name.partition(":")
    if value and is_registered(ENVIRONMENTS, head):
        return PurePath(value).stem
    return name.rpartition(":")[2].rpartition(".")[2] if ":" in name else name


def environment_entries(value: Any) -> list[Any]:
    """List the environments given as comma-separated names, as one mapping, or as a list of names and mappings."""
    items = [value] if isinstance(value, str | dict | EnvironmentChoice) else value
    if not isinstance(items, list | tuple):
        raise ValueError(f"should be a list of environments, not {value!r}")
    entries: list[Any] = []
    for item in items:
        if isinstance(item, str):
            entries += [{"name": name.strip()} for name in item.split(",") if name.strip()]
        elif isinstance(item, dict | EnvironmentChoice):
            entries.append(item)
        else:
            raise ValueError(f"{item!r} is not an environment: give a name, or a mapping with a name")
    if not entries:
        raise ValueError("name at least one environment")
    return entries


def changes(before: EvaluationConfig, now: EvaluationConfig) -> list[str]:
    """Names of the changed keys that would make the samples of one run folder incomparable."""
    from forge_env.config.reader import same_settings

    changed = [
        name
        for name in EvaluationConfig.model_fields
        if name not in FREE_TO_CHANGE | {"environments"}
        and getattr(before, name) != getattr(now, name)
        and not same_settings(getattr(before, name), getattr(now, name))
    ]
    earlier, later = (
        {choice.label: choice.model_dump(exclude={"num_tasks"}) for choice in config.environments}
        for config in (before, now)
    )
    return changed + [
        f"environment {label!r}" for label in earlier if not same_settings(earlier[label], later.get(label))
    ]
