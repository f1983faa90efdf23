"""Tasks from files and the Hugging Face hub: JSONL, CSV, Parquet, hub datasets."""

from __future__ import annotations

import ast
import atexit
import codecs
import csv
import hashlib
import io
import json
import math
import re
import sys
import threading
import time
import tokenize
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from functools import lru_cache, partial
from importlib import import_module
from itertools import islice
from pathlib import Path
from string import ascii_uppercase
from typing import Annotated, Any, Generic, TypeVar
from weakref import WeakSet

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from forge_env import redaction
from forge_env.concurrency import parse_python
from forge_env.errors import ForgeError, InfrastructureError, UsageError, first_line, mistakes, suggestion
from forge_env.machine import user_path
from forge_env.types import Message, Task, Text
from forge_env.visible import shown

T = TypeVar("T")

# ---
# Rows of datasets on the Hugging Face hub, or in a folder with the hub's layout.

HUB_TIMEOUT_S = 10.0
"""Maximum seconds until the hub's first answer."""


def hub_rows(config: DatasetConfig, part: str | None) -> Iterator[Mapping[str, Any]]:
    """Rows of a dataset on the hub, or in a folder with the hub's layout."""
    if not user_path(config.path).is_dir():
        check_hub(config.path)
    try:
        import datasets
    except ImportError as error:
        raise UsageError(
            f"{config.path!r} is not a file; the hub needs `datasets`", fix='pip install "forge-env[data]"'
        ) from error
    # Unknown dataset, configuration or split, or an unreadable file.
    failures = (OSError, ValueError, datasets.exceptions.DatasetsError, _session()[1])
    try:
        with _without_torch(datasets.config):
            dataset = datasets.load_dataset(config.path, config.name, split=part or "train", streaming=config.streaming)
            if config.streaming and config.shuffle_buffer:
                dataset = dataset.shuffle(seed=config.shuffle_seed, buffer_size=config.shuffle_buffer)
    except failures as error:
        raise ForgeError(
            f"can't load dataset {config.path!r}: {first_line(error)}", fix="check path, name and splits"
        ) from error
    return _watched(dataset, config.path, failures)


_LOADING = threading.Lock()


@contextmanager
def _without_torch(config: Any) -> Iterator[None]:
    """Keep `datasets` from importing torch, which takes two seconds and only makes each stream a torch dataset too."""
    with _LOADING:
        installed, config.TORCH_AVAILABLE = config.TORCH_AVAILABLE, False
        try:
            yield
        finally:
            config.TORCH_AVAILABLE = installed


def _watched(
    rows: Iterable[Mapping[str, Any]], path: str, failures: tuple[type[Exception], ...]
) -> Iterator[Mapping[str, Any]]:
    try:
        yield from rows
    except failures as error:
        raise InfrastructureError(f"reading dataset {path!r} failed: {first_line(error)}") from error


def check_hub(dataset: str) -> None:
    """Check that the hub answers: its library would retry for half a minute before it reports a failure."""
    try:
        from huggingface_hub import constants, get_token
    except ImportError:
        return  # the caller reports the missing package
    redaction.add(get_token() or "", "HF_TOKEN")
    if constants.HF_HUB_OFFLINE:
        return  # offline by request: use the cache
    session, failure = _session()
    try:
        session.head(f"{constants.ENDPOINT}/api/datasets/{dataset}", timeout=HUB_TIMEOUT_S)
    except (OSError, failure) as error:
        raise ForgeError(
            f"can't load dataset {dataset!r}: {constants.ENDPOINT} can't be reached: {first_line(error)}",
            fix="check the network; HF_HUB_OFFLINE=1 uses what was downloaded before; a file needs neither",
        ) from error


def _session() -> tuple[Any, type[Exception]]:
    """The hub's HTTP session and its exception class, which depend on the release of `huggingface_hub`."""
    from huggingface_hub import get_session

    session = get_session()
    library = import_module(type(session).__module__.partition(".")[0])
    failure: type[Exception] = library.HTTPError
    return session, failure


# ---
# Tasks from rows. `fe.DatasetConfig(path="openai/gsm8k", name="main", splits={"train": "train", "eval": "test"},
# columns={"prompt": "question"})` defines the source and maps its columns; an environment's `tasks(split)` returns
# `fe.load_tasks(self.config.dataset, split)`.

SETTLED_NS = 100_000_000
"""Nanoseconds after a file's last change within which another change might not alter its modification time."""
TASK_FIELDS = ("id", "prompt", "gold", "difficulty", "tags")


class MissingColumn(UsageError):
    """Error for a mapped column, or the prompt's column, that doesn't exist."""


class DatasetConfig(BaseModel):
    """Source of tasks and mapping of its columns; a path alone is sufficient.

    Examples:
        >>> import forge_env as fe
        >>> fe.DatasetConfig(path="questions.jsonl", columns={"prompt": "question", "gold": "answer"}).is_divided
        False
    """

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, frozen=True)

    path: Annotated[str, Field(min_length=1)]
    """A .jsonl, .json, .csv or .parquet file, a folder of them or in the hub's layout, or the name of a hub dataset."""
    name: str | None = None
    """Configuration of a hub dataset."""
    split: str | None = None
    """Split of the dataset, or file, to read if `splits` is empty; unset: all files, or `train`."""
    splits: dict[str, str] = Field(default_factory=dict)
    """Split of the environment -> split of the dataset, or file. If empty, all splits have the same source."""
    eval_fraction: Annotated[float, Field(ge=0.0, lt=1.0)] | None = None
    """Fraction of prompts held out as `eval` if `splits` is empty; equal prompts are always in the same split. If
    unset, nothing is held out, and every split is the whole source."""
    columns: dict[str, str | None] = Field(default_factory=dict)
    """Field of the task (id, prompt, choices, gold, difficulty, tags; other names become hidden data) -> column, or
    value in it (`reward_model.ground_truth`, also of JSON in a text). null disables a field: by default, a column with
    the name and type of a field is used for it. `choices` are listed after the prompt with letters; the number or text
    of one as `gold` or `answer` becomes its letter. A prompt, or a column `messages`, may be a conversation that ends
    with a user message. If other `messages` are given, the prompt is the first user message, with the system message
    before it; the rest is hidden."""
    streaming: bool = False
    """Whether to read a hub dataset row by row on demand, instead of downloading it first."""
    shuffle_buffer: Annotated[int, Field(ge=0)] = 0
    """Streaming: number of rows read ahead, from which the next one is chosen at random; 0: rows stay in order."""
    shuffle_seed: int = 0
    """Streaming: seed of the random choice."""
    num_tasks: Annotated[int, Field(gt=0)] | None = None
    """Maximum number of tasks of one split."""

    @model_validator(mode="before")
    @classmethod
    def _path_alone(cls, value: Any) -> Any:
        return {"path": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _one_or_several(self) -> DatasetConfig:
        if self.split is not None and self.splits:
            raise ValueError("split and splits exclude each other: give one of them")
        return self

    @property
    def is_divided(self) -> bool:
        """Whether `eval` and `train` have different tasks."""
        return bool(self.splits) or self.eval_fraction is not None


class Stream(Generic[T]):
    """Rows of a source that is read on demand; past its end it starts again."""

    def __init__(self, rows: Callable[[], Iterator[T]]) -> None:
        self._rows = rows
        self._source: Iterator[T] | None = None
        self._opened: Iterator[T] | None = None
        _STREAMS.add(self)
        self._read: list[T] = []
        self._ended = False
        self._lock = threading.Lock()

    def __getitem__(self, index: int) -> T:
        with self._lock:
            self._read_on(index + 1)
            if not self._read:
                raise UsageError("the dataset has no rows")
            return self._read[index % len(self._read)]

    def count(self, most: int) -> int | None:
        """Number of rows, or None if there are more than `most`; reads at most `most + 1` rows."""
        with self._lock:
            self._read_on(most + 1)
            return len(self._read) if self._ended else None

    def _read_on(self, wanted: int) -> None:
        if self._ended or len(self._read) >= wanted:
            return
        if self._source is None:  # at the start, or after the source failed: continue from the last row read
            self._opened = self._rows()
            self._source = islice(self._opened, len(self._read), None)
        source, self._source = self._source, None  # reopened after a failure: a failed iterator yields nothing more
        self._read.extend(islice(source, wanted - len(self._read)))  # rows before a failure are not lost
        self._source = source
        self._ended = len(self._read) < wanted

    def close(self) -> None:
        """Stop reading; rows read so far remain, and the next access reopens the source."""
        with self._lock:
            opened, self._opened, self._source = self._opened, None, None
            if isinstance(opened, Generator):
                opened.close()


class StreamedTasks(Stream[Task]):
    """Tasks of a stream; they have no length."""


_STREAMS: WeakSet[Stream[Any]] = WeakSet()


@atexit.register
def _close_streams() -> None:
    """Close the streams before interpreter shutdown removes the libraries that they read with."""
    for stream in list(_STREAMS):
        stream.close()


def load_tasks(
    config: DatasetConfig | Mapping[str, Any] | str | Path, split: str = "train"
) -> Sequence[Task] | StreamedTasks:
    """Load the tasks of one split; they are cached, and read again after a file has changed.

    Args:
        config: source of the tasks, as a `DatasetConfig`, a dictionary with the same keys, or a path.
        split: split of the environment.

    Raises:
        UsageError: a file, split, column or library is missing; the message names it.
        ForgeError: the hub can't be reached.

    Examples:
        >>> import json, pathlib, tempfile
        >>> import forge_env as fe
        >>> path = pathlib.Path(tempfile.mkdtemp(), "questions.jsonl")
        >>> _ = path.write_text(json.dumps({"prompt": "What is 6 * 7?", "gold": "42"}))
        >>> fe.load_tasks(fe.DatasetConfig(path=str(path)))[0].gold
        '42'
    """
    if not isinstance(config, DatasetConfig):
        config = _config(config)
    return _load(config.model_dump_json(), split, _versions(config, split))


def _config(given: Mapping[str, Any] | str | Path) -> DatasetConfig:
    try:
        return DatasetConfig.model_validate(dict(given) if isinstance(given, Mapping) else str(given))
    except ValidationError as error:
        raise UsageError(f"load_tasks: {mistakes(error)}", fix="see the keys of fe.DatasetConfig") from error


def _versions(config: DatasetConfig, split: str) -> tuple[tuple[str, int, int, int], ...]:
    """Path, size and modification time of each local file to read; empty for a dataset on the hub.

    The last number is 0, or the current time if the file has just changed: another change might not alter its
    modification time.
    """
    path, part = user_path(config.path), config.splits.get(split, config.split)
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    if part is not None and Path(part).suffix in READERS:
        files = [path.parent / part if path.suffix in READERS else Path(part)]
    versions = []
    for file in files:
        if file.is_file():
            state = file.stat()
            unsettled = time.time_ns() - state.st_mtime_ns < SETTLED_NS
            versions.append((str(file), state.st_size, state.st_mtime_ns, time.time_ns() if unsettled else 0))
    return tuple(versions)


@lru_cache(maxsize=64)
def _load(
    config_json: str, split: str, versions: tuple[tuple[str, int, int, int], ...]
) -> Sequence[Task] | StreamedTasks:
    config = DatasetConfig.model_validate_json(config_json)
    if config.streaming:
        return StreamedTasks(lambda: (task for _, task in _tasks(config, split)))
    tasks = list(_tasks(config, split))
    if not tasks:
        raise UsageError(f"{config.path} has no tasks for split {split!r}", fix="check `splits` and `eval_fraction`")
    check_unique(((task.id, row) for row, task in tasks), config.path, "row", "columns: {id: null} numbers the rows")
    return [task for _, task in tasks]


SHOWN_IDS = 5
"""Maximum ids named in an error."""


def check_unique(ids: Iterable[tuple[str, int]], source: str, unit: str, fix: str) -> None:
    """Raise an error if several tasks have the same id.

    Args:
        unit: name of the numbered unit, "row" or "task".
    """
    first: dict[str, int] = {}
    repeated: dict[str, list[int]] = {}
    for task_id, number in ids:
        if first.setdefault(task_id, number) != number:
            repeated.setdefault(task_id, [first[task_id]]).append(number)
    if not repeated:
        return
    named = [
        f"{shown(task_id)} ({unit}s {', '.join(map(str, numbers[:SHOWN_IDS]))}{', ...' * (len(numbers) > SHOWN_IDS)})"
        for task_id, numbers in list(repeated.items())[:SHOWN_IDS]
    ]
    more = f" and {len(repeated) - SHOWN_IDS} more" if len(repeated) > SHOWN_IDS else ""
    raise UsageError(f"{source}: several {unit}s have one id: {', '.join(named)}{more}", fix=fix)


def _tasks(config: DatasetConfig, split: str) -> Iterator[tuple[int, Task]]:
    """Tasks with their row numbers."""
    if config.splits and split not in config.splits:
        raise UsageError(f"{config.path}: `splits` has no {split!r}", fix=f"it has {', '.join(config.splits)}")
    rows = _rows(config, config.splits.get(split) if config.splits else config.split)
    given = 0
    for number, row in enumerate(rows):
        if given == config.num_tasks:
            return
        task = _as_task(config, split, number, row)
        fraction = None if config.splits else config.eval_fraction
        if fraction is None or _is_held_out(task, fraction) == (split == "eval"):
            given += 1
            yield number, task


def _is_held_out(task: Task, fraction: float) -> bool:
    digest = hashlib.sha256(task.prompt.encode()).digest()
    return int.from_bytes(digest[:8], "big") < fraction * 2**64


def _as_task(config: DatasetConfig, split: str, number: int, row: Mapping[str, Any]) -> Task:
    location = f"{config.path}, row {number}"
    row = {name: None if _is_nan(value) else value for name, value in row.items()}
    asked = {field: column for field, column in config.columns.items() if column is not None}
    taken = {field: _value_at(column, row, location if number else config.path) for field, column in asked.items()}
    choices = _choices(taken.pop("choices"), location) if "choices" in asked else {}
    if choices:
        answers = {name: value for name, value in taken.items() if name in ("gold", "answer")}
        taken |= {name: _lettered(value, choices, location) for name, value in answers.items()}
    disabled = {field for field, column in config.columns.items() if column is None}
    _check_images(row, {column.partition(".")[0] for column in asked.values()} | disabled, location)
    mapped = {field: value for field, value in taken.items() if field in TASK_FIELDS}
    unasked = {name: row[name] for name in TASK_FIELDS if name in row and name not in config.columns}
    fitting = {name: value for name, value in unasked.items() if name == "prompt" or _fits(name, value)}
    visible = (asked.get("prompt"), asked.get("choices"))  # the agent reads these columns, so they are not hidden data
    data = {key: value for key, value in row.items() if key not in fitting and key not in visible}
    data |= {field: value for field, value in taken.items() if field not in TASK_FIELDS}
    values: dict[str, Any] = {}
    for name, value in {**fitting, **mapped}.items():
        value = _conversation(value) if name == "prompt" else value
        if name == "prompt" and isinstance(value, list) and all(isinstance(row, Mapping) for row in value):
            values["history"], values["prompt"] = _as_prompt(read_messages(value, location), location)
        elif value is not None:  # null counts as absent
            values[name] = _field(name, _spoken(value) if name == "gold" else value, location, row)
    if "prompt" not in values and isinstance(messages := _conversation(data.get("messages")), list) and messages:
        values["history"], values["prompt"] = _opening(messages, location)
    if isinstance(prompt := values.get("prompt"), str) and not prompt.strip():
        raise UsageError(f"{location}: the prompt is empty", fix="correct or remove the row")
    if prompt is None:
        fix = f"map one: columns: {{prompt: COLUMN}}; {_names(row)}"
        if len(row) == 1 and (between := next((sign for sign in ";\t|" if sign in next(iter(row))), None)):
            fix = f"columns of a .csv are separated by commas, not by {between!r}"
        problem = "the prompt is null" if "prompt" in fitting or "prompt" in mapped else "no column 'prompt'"
        raise MissingColumn(f"{location}: {problem}", fix=fix)
    if choices:
        values["prompt"] += "\n\n" + "\n".join(
            f"{letter}. {text}" for letter, text in choices.items() if text is not None
        )
    return Task(**{"id": f"{split}-{number}", **values}, data=data, split=split)


def _choices(value: Any, place: str) -> dict[str, str | None]:
    """Return the text of each choice by letter; None for null choices, as in padded lists.

    Accepts a list, `{"A": ...}` or ARC's `{"text": [...], "label": [...]}`, also as JSON text.
    """
    value = texts = from_text(value)
    letters: Sequence[Any] = ascii_uppercase
    if isinstance(value, Mapping):
        is_arc = {"text", "label"} <= value.keys()
        letters, texts = (value["label"], value["text"]) if is_arc else (list(value), list(value.values()))
    is_list = isinstance(texts, list) and not any(isinstance(text, list | Mapping) for text in texts)
    if not is_list or not 0 < len(texts) <= len(letters):
        raise UsageError(f"{place}: choices: not a list of texts", fix="map a column with a list, or none")
    return {str(letter): None if text is None else str(text) for letter, text in zip(letters, texts, strict=False)}


def _check_images(row: Mapping[str, Any], known: Set[str], place: str) -> None:
    """Refuse images, which a task from a row can't show, unless their column is mapped or disabled."""
    for name, value in row.items():
        first = value[0] if isinstance(value, list) and value else value
        is_image = isinstance(first, Mapping) and first.keys() == {"bytes", "path"}
        if is_image and name not in known and list(first.values()) != [None, None]:
            fix = f"columns: {{{name}: null}} plays the row without them"
            raise UsageError(f"{place}: the column {name!r} has images, which are not shown", fix=fix)


def _lettered(value: Any, choices: Mapping[str, str | None], place: str) -> Any:
    """The letter of a choice that is given by letter, number (from 0) or text; several letters are unchanged.

    So are values of other types.

    Raises:
        UsageError: a text or number names no choice, or several.
    """
    letters = list(choices)
    if isinstance(value, str) and value.strip(" ().") in choices:
        return value.strip(" ().")
    if isinstance(value, int | float) and not isinstance(value, bool) and value in range(len(letters)):
        return letters[int(value)]  # a null turns a column of integers into floats
    if isinstance(value, str):
        texts = [text and text.strip() for text in choices.values()]
        if texts.count(value.strip()) == 1:
            return letters[texts.index(value.strip())]
        if value.isdecimal() and int(value) < len(letters):
            return letters[int(value)]
        if (letter := value.strip(" ().").upper()) in choices:
            return letter
        if (several := re.findall(r"\w", value)) and {*several} <= choices.keys():
            return value
    if isinstance(value, str | int | float):
        fix = f"give a letter ({', '.join(letters)}), a number from 0, or a text that occurs once"
        raise UsageError(f"{place}: the answer {shown(value)} is none of the choices", fix=fix)
    return value


def _value_at(column: str, row: Mapping[str, Any], place: str) -> Any:
    """Return the value of a column, or a value nested in it: `reward_model.ground_truth`, `answers.text.0`."""
    if column in row:
        return row[column]
    value: Any = row
    for name in column.split("."):
        value = from_text(value)
        value = {str(place): each for place, each in enumerate(value)} if isinstance(value, list) else value
        if not isinstance(value, Mapping) or name not in value:
            location = f"{place}, unlike those before it," if ", row " in place else place
            raise MissingColumn(f"{location} has no column {column!r}", fix=suggestion(column, row, _names(row)))
        value = value[name]
    return value


def from_text(value: Any) -> Any:
    """Parse text of an object or list in JSON, or in Python, as pandas writes it; return other values unchanged."""
    if not isinstance(value, str) or value.lstrip()[:1] not in ("{", "["):
        return value
    with suppress(ValueError, RecursionError):
        return json.loads(value)
    with suppress(ValueError, SyntaxError, RecursionError, MemoryError, TypeError):
        return ast.literal_eval(parse_python(_with_commas(value.strip()), "eval"))
    return value


def _with_commas(source: str) -> str:
    """Insert the commas that numpy leaves out between texts and numbers: Python would join the texts."""
    items = (tokenize.STRING, tokenize.NUMBER)
    result: list[tuple[int, str]] = []
    with suppress(tokenize.TokenError):
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type in items and result and result[-1][0] in items:
                result.append((tokenize.OP, ","))
            if token.type != tokenize.NL:
                result.append(token[:2])
        return tokenize.untokenize(result)
    return source


def _conversation(value: Any) -> Any:
    """Parse text that is a list of messages; return other values unchanged."""
    rows = from_text(value)
    is_conversation = isinstance(rows, list) and rows and all(isinstance(row, dict) for row in rows)
    return rows if is_conversation and {"role", "from"} & rows[0].keys() else value


def _is_nan(value: Any) -> bool:
    """Whether a value is NaN, which pandas writes for missing values."""
    return isinstance(value, float) and math.isnan(value)


# ---
# Conversations in rows: OpenAI's `role` and `content`, or ShareGPT's `from` and `value`.

ROLES = {"human": "user", "gpt": "assistant", "model": "assistant", "developer": "system"}
"""Message roles by other names: those of ShareGPT and Google, and OpenAI's newer name of the system role."""
IGNORED = ("annotations", "id", "metadata", "model", "source", "weight")
"""Fields of messages in OpenAI's and Inspect's formats that are not part of the conversation."""
_TEXTS = ("input_text", "output_text")
"""Types of texts in OpenAI's Responses API."""


def read_messages(rows: Sequence[Any], place: str) -> list[Message]:
    """Parse the messages of a conversation in a row. `UsageError`: one of them is not a message."""
    return [_message(row, place) for row in rows]


def _message(row: Any, place: str) -> Message:
    if isinstance(row, Mapping) and "from" in row:
        row = {"role": row["from"], "content": row.get("value") or ""}
    given = row
    if isinstance(row, Mapping):
        given = {name: value for name, value in row.items() if value is not None and name not in IGNORED}
    if isinstance(given, dict) and isinstance(role := given.get("role"), str):
        given["role"] = ROLES.get(role, role)
    try:
        if isinstance(given, dict) and isinstance(parts := given.get("content"), list):
            given["content"] = [{**part, "type": "text"} if part["type"] in _TEXTS else part for part in parts]
        return Message.from_openai(given) if isinstance(given, dict) else Message.model_validate(given)
    except ValidationError as error:
        raise UsageError(f"{place}: not a message: {mistakes(error)}", fix="give role and content of each") from error
    except (KeyError, TypeError) as error:
        raise UsageError(f"{place}: not a message: a part of its content is neither text nor an image") from error


def _as_prompt(messages: list[Message], place: str) -> tuple[list[Message], str]:
    """Split a conversation that the agent continues into history and prompt."""
    if messages and messages[-1].images:
        raise UsageError(f"{place}: the prompt has an image, which a task from a row can't show")
    if not messages or messages[-1].role != "user":
        last = messages[-1].role if messages else "nothing"
        raise UsageError(
            f"{place}: prompt: it must end with a user message, but ends with {last}",
            fix="columns: {prompt: null, messages: COLUMN} takes its system message and the user's first message",
        )
    return messages[:-1], messages[-1].content


def _opening(rows: list[Any], place: str) -> tuple[list[Message], str | None]:
    """History and prompt of a conversation in a column `messages`.

    A conversation that ends with a user message is used whole. In others, later messages may contain the answer, so
    only the system message and the user's first message are used. The prompt is None if there is no user message.
    """
    if _role(rows[-1]) == "user":
        return _as_prompt(read_messages(rows, place), place)
    history: list[Message] = []
    for row in rows:
        if _role(row) == "user":
            return _as_prompt([*history, _message(row, place)], place)
        if _role(row) == "system":
            history.append(_message(row, place))
    return history, None


def _role(row: Any) -> str | None:
    """Role of a message in a row, by OpenAI's name."""
    role = row.get("role", row.get("from")) if isinstance(row, Mapping) else None
    return ROLES.get(str(role), role)


def _spoken(gold: Any) -> Any:
    """Content of a single assistant message, TRL's format of a completion; other values are returned unchanged."""
    if (
        isinstance(gold, list)
        and len(gold) == 1
        and isinstance(gold[0], Mapping)
        and gold[0].get("role") == "assistant"
    ):
        return gold[0].get("content")
    return gold


def _names(row: Mapping[str, Any]) -> str:
    return f"columns: {', '.join(map(str, row))}"


def _fits(field: str, value: Any) -> bool:
    """Whether an unmapped column with the name of a task field fits that field's type."""
    try:
        return value is None or _TYPES[field].validate_python(value) is not None
    except ValidationError:
        return False


def _field(field: str, value: Any, place: str, row: Mapping[str, Any]) -> Any:
    """Convert a column's value to a field of the task."""
    try:
        return _TYPES[field].validate_python(value)
    except ValidationError as error:
        fix = f"columns: {{{field}: COLUMN}} takes another; {_names(row)}"
        if field != "prompt":
            fix = f"columns: {{{field}: null}} takes none, {fix}"
        raise UsageError(f"{place}: {field}: {mistakes(error)}", fix=fix) from error


_TYPES: dict[str, TypeAdapter[Any]] = {
    "id": TypeAdapter(Annotated[str, BeforeValidator(lambda id: id if isinstance(id, list | dict) else str(id))]),
    "prompt": TypeAdapter(str),
    "gold": TypeAdapter(Text),
    "difficulty": TypeAdapter(int),
    "tags": TypeAdapter(list[str]),
}


def _rows(config: DatasetConfig, part: str | None) -> Iterable[Mapping[str, Any]]:
    """Rows of the file or hub split that `part` names; None: all rows."""
    path = user_path(config.path)
    if path.is_dir():
        if any((path / name).is_file() for name in SAVED):
            raise UsageError(f"{path} was written by save_to_disk", fix="write it with to_parquet, one file per split")
        names = sorted(file for file in path.iterdir() if file.suffix in READERS and file.name not in WITHOUT_ROWS)
        if not names and any(file.suffix in READERS for file in path.rglob("*")):
            return hub_rows(config, part)
        if part is not None:  # the hub's file of a split is called `train-00000-of-00001.parquet`
            names = [file for file in names if part in (file.name, file.stem) or file.stem.startswith(f"{part}-0")]
        if not names:
            raise UsageError(f"the folder {path} has no {' or '.join(READERS)} file{f' {part!r}' if part else ''}")
        return (row for file in names for row in READERS[file.suffix](file))
    if part is not None and Path(part).suffix in READERS:
        return _file_rows(path.parent / part if path.suffix in READERS else Path(part))
    if path.suffix in READERS:
        return _file_rows(path)
    if path.is_file():
        fix = f"supported: {', '.join(READERS)}"
        raise UsageError(f"can't read tasks from {path}", fix=f"gunzip it; {fix}" if path.suffix == ".gz" else fix)
    return hub_rows(config, part)


def _file_rows(path: Path) -> Iterable[Mapping[str, Any]]:
    if not path.is_file():
        raise UsageError(f"there is no file {path}", fix="check `dataset.path`")
    with path.open("rb") as file:
        if file.read(len(LFS_POINTER)) == LFS_POINTER:
            raise UsageError(f"{path} is a pointer of Git LFS, not the file itself", fix="git lfs pull")
    return READERS[path.suffix](path)


def jsonl_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Read the line number and object of each line. Only a line feed ends a line: texts may contain other separators.

    Raises:
        UsageError: a line is not UTF-8, not JSON, or not an object.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
            if not line.strip():
                continue
            row = _from_json(line, f"{path}, line {number}", "a row is one line; a list of objects must be named .json")
            if not isinstance(row, dict):
                raise UsageError(f"{path}, line {number}: a row is a JSON object, this is a {type(row).__name__}")
            yield number, row


def _json_rows(path: Path) -> Iterator[Mapping[str, Any]]:
    fix = "a file with one object per line must be named .jsonl"
    rows = _from_json(path.read_bytes().removeprefix(codecs.BOM_UTF8), str(path), fix)
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise UsageError(f"{path} is not a list of objects", fix=fix)
    return iter(rows)


def _from_json(content: bytes, place: str, fix: str | None = None) -> Any:
    try:
        return json.loads(content.decode("utf-8"), object_pairs_hook=partial(_object, place))
    except UsageError:
        raise
    except UnicodeDecodeError as error:
        raise _not_utf_8(place, error) from error
    except RecursionError as error:
        raise UsageError(f"{place}: it is nested too deeply") from error
    except ValueError as error:
        raise UsageError(f"{place}: not valid JSON: {error}", fix=fix) from error


def _check_names(names: Iterable[str], place: str) -> None:
    """Raise an error for repeated column names, of which only the last column would be read."""
    counts = Counter(names)
    if repeated := [name for name, count in counts.items() if count > 1]:
        raise UsageError(f"{place}: several columns are called {', '.join(map(repr, repeated))}", fix="rename them")


def _object(place: str, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        _check_names((name for name, _ in pairs), place)
    return result


def _csv_rows(path: Path) -> Iterator[Mapping[str, Any]]:
    csv.field_size_limit(sys.maxsize)  # prompts may exceed Python's default limit of 131,072 characters
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, strict=True)
        try:
            _check_names(filter(None, reader.fieldnames or []), f"{path}, line 1")
            for row in reader:
                if None in row or None in row.values():
                    names = reader.fieldnames or []
                    location = f"{path}, line {reader.line_num}"
                    raise UsageError(f"{location}: a row needs {len(names)} values: {', '.join(names)}")
                yield row
        except UnicodeDecodeError as error:
            raise _not_utf_8(str(path), error) from error
        except (csv.Error, ValueError) as error:
            raise UsageError(f"{path}, line {reader.line_num + 1}: not valid CSV: {error}") from error


def _parquet_rows(path: Path) -> Iterator[Mapping[str, Any]]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise UsageError("reading Parquet needs pyarrow", fix='pip install "forge-env[data]"') from error
    try:
        file = parquet.ParquetFile(path)
        _check_names(file.schema_arrow.names, str(path))
        for batch in file.iter_batches():
            yield from batch.to_pylist()
    except ArrowException as error:
        raise UsageError(f"{path}: {first_line(error)}") from error


def _not_utf_8(place: str, error: UnicodeDecodeError) -> UsageError:
    is_utf_16 = error.object.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    encoding, which = ("utf-16", "this file") if is_utf_16 else ("latin1", "Western European text")
    fix = f"save it as UTF-8: `iconv -f {encoding} -t utf-8 OLD > NEW` for {which}"
    return UsageError(f"{place}: not UTF-8: {error.reason}", fix=fix)


WITHOUT_ROWS = ("dataset_info.json", "dataset_infos.json")
"""Files without rows in a folder with the hub's layout."""
SAVED = ("dataset_dict.json", "state.json")
"""Files in folders that `save_to_disk` of the library `datasets` writes."""
LFS_POINTER = b"version https://git-lfs.github.com/spec/"
READERS: dict[str, Callable[[Path], Iterator[Mapping[str, Any]]]] = {
    ".jsonl": lambda path: (row for _, row in jsonl_rows(path)),
    ".json": _json_rows,
    ".csv": _csv_rows,
    ".parquet": _parquet_rows,
}
