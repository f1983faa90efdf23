"""What an evaluation is told: the same keys in a YAML file, as flags of `forge-env eval`, and in Python."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path
from typing import Any, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from forge_env.endpoint.policy import EndpointOptions
from forge_env.errors import ConfigError, did_you_mean
from forge_env.machine import user_path

ENDLESS_N = 100
"""Tasks taken from an environment whose tasks never end, when no number is given."""
FREE_TO_CHANGE = {
    *("n", "epochs", "budget", "prices", "confidence", "success", "score", "out", "sandbox", "max_samples"),
    *("base_url", "uds", "api_key_env", "timeout_s", "retries", "first_delay_s", "longest_delay_s", "vllm_args"),
    *("concurrency", "start_concurrency", "sample_retries", "max_failures", "stream"),
}
"""Keys that may differ when a run is resumed: they change no sample's meaning."""


class EnvironmentChoice(BaseModel):
    """One environment to evaluate on."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    name: str
    """Registered name, or import path `module:Class`."""
    label: str = ""
    """What it is called in the results; when not given, the registered name or that of the class."""
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


class EvaluationConfig(EndpointOptions):
    """An evaluation. The keys of `EndpointOptions` say how a model behind an endpoint is asked."""

    environments: list[EnvironmentChoice] = Field(min_length=1)
    """What to evaluate on; a name stands for an environment with its defaults."""
    n: int | None = Field(None, ge=1)
    """Number of tasks of each environment, the first ones; all when not given (100 where they never end)."""
    epochs: int = Field(1, ge=1)
    """Samples of each task."""
    split: str | None = None
    """Split to take tasks from; `eval` where an environment has it, else its first."""
    seed: int = 0
    """Every sample's own seed follows from this one."""
    score: str = "reward"
    """What is reported: the reward, or the name of one of the environment's metrics."""
    success: float | None = None
    """Score from which a sample has solved its task; a perfect episode's when not given."""
    confidence: float = Field(0.95, gt=0, lt=1)
    """Of every interval."""
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
    sandbox: str = "auto"
    """Sandbox engine: auto, docker, local."""
    max_samples: int | None = Field(None, ge=1)
    """Most samples under way at once; twice `concurrency` when not given."""
    sample_retries: int = Field(1, ge=0)
    """Times a sample is played again after an infrastructure failure, besides the endpoint's own retries."""
    max_failures: int = Field(20, ge=1)
    """Samples lost one after another until the run gives up."""
    vllm_args: list[str] = Field(default_factory=list)
    """More arguments of `vllm serve`, for `model: vllm:PATH`."""
    out: Path | None = None
    """Folder of the results; a new one under runs/ when not given."""

    @field_validator("environments", mode="before")
    @classmethod
    def _names(cls, value: Any) -> Any:
        return environment_entries(value)

    @field_validator("split", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        return as_text(value)

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
        raise ValueError(f"a list of environments is expected, not {value!r}")
    entries: list[Any] = []
    for item in items:
        if isinstance(item, str):
            entries += [{"name": name.strip()} for name in item.split(",") if name.strip()]
        elif isinstance(item, dict | EnvironmentChoice):
            entries.append(item)
        else:
            raise ValueError(f"{item!r} is no environment: a name is expected, or a mapping with a name")
    if not entries:
        raise ValueError("there is none: name at least one environment")
    return entries


def build(data: dict[str, Any]) -> EvaluationConfig:
    """Validate; every mistake is named, with the key that was probably meant."""
    try:
        return EvaluationConfig.model_validate(data)
    except ValidationError as error:
        problems = []
        for item in error.errors(include_url=False):
            key = ".".join(str(part) for part in item["loc"])
            if item["type"] == "extra_forbidden":
                guess = did_you_mean(str(item["loc"][-1]), EvaluationConfig.model_fields)
                problems.append(f"there is no key {key!r}" + (f" (did you mean {guess!r}?)" if guess else ""))
            elif item["type"] == "missing":
                problems.append(f"{key!r} is missing")
            else:
                message = item["msg"].removeprefix("Value error, ")
                problems.append(f"{key}: {message}" if key else message)
        raise ConfigError("; ".join(problems), fix="see forge-env eval --help") from error


class _Loader(yaml.SafeLoader):
    """YAML in which 1e-4 is a number."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+0123456789.")
)


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file; `ConfigError` when there is none."""
    try:
        data = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except OSError as error:
        raise ConfigError(f"can't read {path}: {error.strerror}", fix="check the path") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())[:300]}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: a mapping of keys to values is expected")
    return data


TEXTS = {
    name for name, field in EvaluationConfig.model_fields.items() if field.annotation in (str, str | None, Path | None)
}
"""Keys whose value is text, whatever else YAML would take it for."""


def parse_flag(name: str, text: str) -> Any:
    """The value that the text of a flag stands for."""
    return text if name in TEXTS and text != "null" else parse_value(text)


def parse_value(text: str) -> Any:
    """The value that a text stands for, read as YAML."""
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError:
        return text


def to_yaml(config: EvaluationConfig, *, always: Collection[str] = ()) -> str:
    """Every key that is not at its default, and those that `always` names."""
    data = config.model_dump(mode="json", exclude_defaults=True)
    data |= config.model_dump(mode="json", include=set(always))
    return yaml.safe_dump(data, sort_keys=False, allow_unicode=True)


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
