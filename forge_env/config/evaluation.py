"""What an evaluation is told: the same keys in a YAML file, as flags of `forge-env eval`, and in Python.

A field's docstring is its documentation, and a class's is the title of its flags in `forge-env eval --help`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from forge_env.errors import UsageError
from forge_env.machine import user_path

LOCAL = "http://localhost:8000/v1"
ENDLESS_N = 100
"""Tasks taken from an environment whose tasks never end, when no number is given."""
FREE_TO_CHANGE = {
    *("n", "epochs", "budget", "prices", "confidence", "success", "score", "out", "sandbox", "max_samples"),
    *("base_url", "uds", "api_key_env", "timeout_s", "retries", "first_delay_s", "longest_delay_s", "vllm_args"),
    *("concurrency", "start_concurrency", "sample_retries", "max_failures", "stream"),
}
"""Keys that may differ when a run is resumed: they change no sample's meaning."""


class Options(BaseModel):
    """Keys that are given by name; unknown ones are refused."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class EndpointOptions(Options):
    """Asking the model."""

    model: str
    """An endpoint's model, `vllm:PATH` (a checkpoint that is served for the run), or a policy: `gold` (the reference \
solutions), `random`, `empty`, `module:function`."""
    base_url: str = Field(default_factory=lambda: os.environ.get("OPENAI_BASE_URL", LOCAL))
    """Address of the endpoint, up to and including `/v1`; unset: OPENAI_BASE_URL, else port 8000 of this machine."""
    uds: str | None = None
    """Unix socket to connect to instead of the address's host."""
    api_key_env: str = "OPENAI_API_KEY"
    """Environment variable that holds the key; none is sent where it is not set."""
    tools: Literal["native", "text"] = "native"
    """`native`: the endpoint's own tool calls; `text`: described in the system message, parsed from the reply."""
    stream: bool = False
    """Ask for server-sent events: keeps proxies from closing a connection that is silent for minutes."""
    exact_tokens: bool | None = None
    """Ask for token ids and log-probs as vLLM gives them; unset: where the endpoint says that it is vLLM."""
    temperature: float | None = Field(None, ge=0)
    """Sampling temperature; unset: the endpoint's default."""
    top_p: float | None = Field(None, gt=0, le=1)
    """Nucleus sampling; unset: the endpoint's default."""
    max_tokens: int | None = Field(None, ge=1)
    """Tokens of one reply; unset: the endpoint's default."""
    send_seed: bool = False
    """Send every sample's own seed."""
    extra: dict[str, Any] = Field(default_factory=dict)
    """More fields of the request, as they are: `{top_k: 4}`, or `extra.top_k=4`."""
    timeout_s: float = Field(600.0, gt=0)
    """Seconds until an answer must be complete."""
    retries: int = Field(6, ge=0)
    """Times a request is asked again after a passing failure."""
    first_delay_s: float = Field(0.5, ge=0)
    """Delay before the first of them; doubled each time, varied by half to either side."""
    longest_delay_s: float = Field(60.0, ge=0)
    """Longest such delay, before it is varied."""
    concurrency: int = Field(256, ge=1)
    """Most requests in flight; how many there are follows the endpoint."""
    start_concurrency: int = Field(16, ge=1)
    """Requests in flight before anything is known of the endpoint."""

    @field_validator("base_url")
    @classmethod
    def _address(cls, value: str) -> str:
        from forge_env.endpoint.http import address

        try:
            address(value)
        except UsageError as error:
            raise ValueError(str(error)) from error
        return value


class SampleOptions(Options):
    """Samples."""

    n: int | None = Field(None, ge=1)
    """Number of tasks of each environment, the first ones; unset: all (100 where they never end)."""
    epochs: int = Field(1, ge=1)
    """Samples of each task."""
    split: str | None = None
    """Split to take tasks from; unset: `eval` where an environment has it, else its first."""
    seed: int = 0
    """Every sample's own seed follows from this one."""
    sandbox: str = "auto"
    """Sandbox engine: `auto`, `docker`, `local`, or another installed one."""
    max_samples: int | None = Field(None, ge=1)
    """Most samples under way at once; unset: twice `concurrency`."""
    sample_retries: int = Field(1, ge=0)
    """Times a sample is played again after an infrastructure failure, besides the endpoint's own retries."""
    max_failures: int = Field(20, ge=1)
    """Samples lost one after another until the run gives up."""

    @field_validator("split", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        return as_text(value)


class LimitOptions(Options):
    """Limits."""

    turn_limit: int | None = Field(None, ge=1)
    """Assistant messages of a sample; an environment's own limit holds as well."""
    token_limit: int | None = Field(None, ge=1)
    """Tokens a model may write in a sample."""
    time_limit: float | None = Field(None, gt=0)
    """Wall seconds of a sample."""
    working_limit: float | None = Field(None, gt=0)
    """Seconds of a sample without waiting for rate limits and free sandboxes."""
    tool_call_limit: int | None = Field(None, ge=0)
    """Tool calls of a sample."""
    cost_limit: float | None = Field(None, gt=0)
    """Cost of a sample, in the unit of `prices`."""
    budget: float | None = Field(None, gt=0)
    """Cost of the whole run, resumed parts included; reached, the run stops and can be resumed with more."""
    prices: Path | None = None
    """YAML file of prices: model -> {input, output, cached_input} for a million tokens."""


class FigureOptions(Options):
    """Figures."""

    score: str = "reward"
    """What is reported: `reward`, or the name of one of the environment's metrics."""
    success: float | None = None
    """Score from which a sample has solved its task; unset: a perfect episode's."""
    confidence: float = Field(0.95, gt=0, lt=1)
    """Confidence of every interval."""


class EnvironmentChoice(Options):
    """One environment to evaluate on."""

    name: str
    """Registered name, or import path `module:Class`."""
    label: str = ""
    """What it is called in the results; unset: the registered name, or that of the class."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the environment."""
    split: str | None = None
    """Which of its splits, when another than `split` of the evaluation."""
    n: int | None = Field(None, ge=1)
    """Number of tasks, when another than `n` of the evaluation."""

    @field_validator("split", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        return as_text(value)

    @model_validator(mode="after")
    def _label(self) -> Self:
        self.label = self.label or short_name(self.name)
        return self


class EvaluationConfig(FigureOptions, LimitOptions, SampleOptions, EndpointOptions):
    """The evaluation."""

    environments: list[EnvironmentChoice] = Field(min_length=1)
    """What to evaluate on: names, or mappings of `name`, `label`, `options`, `split`, `n`."""
    out: Path | None = None
    """Folder of the results; unset: a new one under runs/."""
    vllm_args: list[str] = Field(default_factory=list)
    """More arguments of `vllm serve`, for `model: vllm:PATH`."""

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
        for choice in self.environments:  # classes of one name in two modules
            if labels.count(choice.label) > 1 and choice.label == short_name(choice.name):
                choice.label = choice.name
        labels = [choice.label for choice in self.environments]
        if repeated := {label for label in labels if labels.count(label) > 1}:
            raise ValueError(f"two environments are labelled {sorted(repeated)[0]!r}; give one another `label`")
        for name in ("budget", "cost_limit"):
            if getattr(self, name) is not None and self.prices is None:
                raise ValueError(f"`{name}` needs `prices`")
        return self

    @property
    def endpoint(self) -> EndpointOptions:
        """The endpoint's part."""
        return EndpointOptions(**self.model_dump(include=set(EndpointOptions.model_fields)))

    @property
    def running(self) -> int:
        """Most samples under way at once."""
        return self.max_samples or 2 * self.concurrency


def short_name(name: str) -> str:
    """The class of `module:Class`, or the registered name."""
    return name.rpartition(":")[2].rpartition(".")[2] if ":" in name else name


def as_text(value: Any) -> Any:
    """A split called 2024 is a number only to YAML."""
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


def environment_entries(value: Any) -> list[Any]:
    """The environments that a text, a list of names and mappings, or one mapping stands for.

    Raises:
        ValueError: it is something else, or stands for none.
    """
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
    """Keys whose change would make samples of one folder incomparable."""
    found = [
        name
        for name in EvaluationConfig.model_fields
        if name not in FREE_TO_CHANGE | {"environments"} and getattr(before, name) != getattr(now, name)
    ]
    earlier = {choice.label: choice.model_copy(update={"n": None}) for choice in before.environments}
    later = {choice.label: choice.model_copy(update={"n": None}) for choice in now.environments}
    return found + [f"environment {label!r}" for label in earlier if later.get(label) != earlier[label]]
