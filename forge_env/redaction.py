"""Secrets stay out of what is written: files, logs and the terminal show `(redacted NAME)` in their place.

Values become known when they are read (`add`, `learn`), and whatever writes text redacts it: `forge_env.files` (every
file of a run or an evaluation), `forge_env.logs`, the console of the command line (`console`), `forge_env.visible`.
A secret is replaced as it is, and as JSON, URLs, HTML, hexadecimal and base64 spell it, also inside a longer
text that was encoded ("Basic USER:KEY"). Token ids are never changed: what is trained on stays what was sampled.
"""

from __future__ import annotations

import base64
import html
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from typing import Any, TextIO, cast
from urllib.parse import quote, quote_plus, unquote, unquote_plus, urlsplit

LEAST = 8
"""Characters of the shortest secret that is replaced anywhere; of shorter ones, only `Bearer SECRET` is: a placeholder
such as "EMPTY" is part of many words."""
LEAST_LINE = 16
"""Characters of a line that is replaced by itself, of a secret of several lines."""
MARK = re.compile(r"\(redacted [^()\s]+\)")
"""Stands in a text for a secret. It needs no quotes or escapes in JSON, YAML, HTML and a rich console."""
NAMED = re.compile(
    r"(?:^|[_.-])(?:(?:api|access|private|secret|auth|account|subscription|signing|encryption|master)[_-]?key"
    r"|pass(?:word|wd|phrase)?|secret|token|credentials?|authorization|cookie|(?<=_)(?:pwd|pat|sas))$"
)
"""Names of settings whose values are secrets, in lower case."""
VARIABLE = re.compile(rf"{NAMED.pattern}|_(?:key|auth)$|password$|apikey$")
"""Names of environment variables whose values are secrets, in lower case."""
KEYLIKE = re.compile(
    r"(?<![\w-])(?:(?:sk|pk|rk|xai|glpat|nvapi|pplx|csk|xoxb|xoxp)-|(?:sk|hf|gsk|gh[posu]|github_pat|r8|rpa)_|A(?:KIA|Iza))"
    r"(?=[\w-]*[A-Z0-9])[\w-]{8,}"
)
"""Keys by the form that their issuers give them."""
_IN_QUERY = ("key", "sig", "signature", "code", "auth")
_RANDOM = re.compile(r"(?=[^\W_]*\d)(?=[^\W_]*[A-Za-z])[^\W_]{16,}|[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_PAIR = re.compile(r"""([\w.-]+)["']?\s*[:=]\s*["']?([^\s,"'{}\[\]]+)""")
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")

_names: dict[str, str] = {}
"""Name of each secret, by value."""
_forms: list[tuple[str, bytes, str]] = []
"""What is replaced: text, the same as UTF-8, and what stands for it. The longest first."""


# ---
# What is secret.


def add(value: str, name: str) -> None:
    """Keep `value` out of all that is written from here on.

    Args:
        value: the secret; "" is none.
        name: stands in its place.
    """
    global _forms
    value = value.strip()
    if not value or value in _names or MARK.search(value):
        return
    _names[value] = name
    mark = f"(redacted {re.sub(r'[^A-Za-z0-9_.-]+', '-', name) or 'secret'})"
    known = {text for text, _, _ in _forms}
    made = [(f"Bearer {value}", f"Bearer {mark}")] if len(value) < LEAST else [(form, mark) for form in _spelled(value)]
    added = [(form, form.encode("utf-8", "surrogatepass"), mark) for form, mark in made if form not in known]
    _forms = sorted([*_forms, *added], key=lambda form: -len(form[0]))


def _spelled(value: str) -> set[str]:
    """The secret in all spellings that are replaced."""
    lines = [line for line in value.splitlines() if len(line) >= LEAST_LINE and "-----" not in line]
    forms = {form for text in (value, *lines) for form in (text, json.dumps(text)[1:-1], html.escape(text))}
    forms |= {json.dumps(value, ensure_ascii=False)[1:-1], repr(value)[1:-1], quote_plus(value)}
    forms |= {quote(value, safe=safe) for safe in ("", "/", "/!$&'()*+,;=:@?")}  # in a query, in paths
    forms |= {json.dumps(form)[1:-1] for form in forms}  # a tool call's arguments are JSON in JSON
    content = value.encode("utf-8", "surrogatepass")
    forms |= {content.hex(), content.hex().upper()}
    for encoded in (base64.b64encode, base64.urlsafe_b64encode):
        forms.add(encoded(content).decode().rstrip("="))
        for before in range(3):  # bytes of what precedes it in the three that four characters encode
            text = encoded(bytes(before) + content).decode()
            depends = 1 + text.count("=") if text.endswith("=") else 0  # on what follows
            forms.add(text[(0, 2, 3)[before] : len(text) - depends])
    return {form for form in forms if len(form) >= LEAST}


def names_secret(name: str) -> bool:
    """Whether a setting of this name holds a secret: `api_key`, `judge.apiKey`, `X-Auth-Token`."""
    return NAMED.search(_CAMEL.sub("_", name).lower()) is not None


def learn(value: Any, name: str = "") -> None:
    """Add the secrets in settings: by their names, by their form, and those in addresses.

    Args:
        value: mappings, lists and texts, as read from a file or a command line.
        name: dotted key of the value.
    """
    if isinstance(value, Mapping):
        for key, item in value.items():
            learn(item, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list | tuple):
        for item in value:
            learn(item, name)
    elif isinstance(value, str):
        scheme, _, credentials = value.strip().partition(" ")
        if scheme.lower() in ("bearer", "basic", "token") and credentials:
            add(credentials, name)
        if scheme.lower() == "basic":
            with suppress(ValueError):  # of base64 and UTF-8
                add(base64.b64decode(credentials, validate=True).decode().partition(":")[2], name)
        if names_secret(name) and _is_key(value):
            add(value, name)
        for key in KEYLIKE.finditer(value):
            add(key[0], name)
        if "://" in value:
            learn_address(value, name)


def _is_key(value: str) -> bool:
    """Whether the value of a setting that is called like one may be a secret; `<|end|>` and a path are none."""
    return not re.fullmatch(r"<.*>|\[.*\]", value) and not os.path.exists(value)


def learn_arguments(arguments: Sequence[str]) -> None:
    """Add the secrets of a command line: `--api-key VALUE`, `--extra.token=VALUE`, `api_key=VALUE`, addresses."""
    before = ""
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if equals and "://" not in name:
            learn(value, name.lstrip("-").replace("-", "_"))
        elif before.startswith("-"):
            learn(argument, before.lstrip("-").replace("-", "_"))
        elif not argument.startswith("-"):
            learn(argument, "argument")
        for pair in _PAIR.finditer(argument):  # YAML, which may turn out to be none
            learn(pair[2], pair[1])
        before = argument


def learn_environment() -> None:
    """Add the environment variables whose names say that they are secret, and passwords in addresses of others."""
    for name, value in os.environ.items():
        if VARIABLE.search(name.lower()) and _is_key(value):
            add(value, name)
        elif "://" in value:
            learn_address(value, name)


def learn_address(address: str, name: str, *, path: bool = False) -> None:
    """Add what is secret in an address: its password, a key in its query, or one in its path.

    Args:
        address: a URL.
        name: of its setting.
        path: whether a part of the path that looks random is one too.
    """
    try:
        parts = urlsplit(address.strip())
        password = parts.password or (parts.username if parts.scheme not in ("ssh", "git") else None)
    except ValueError:  # not an address, which is said elsewhere
        return
    secrets = [password] if password else []
    for key, _, text in (pair.partition("=") for pair in parts.query.split("&")):
        if names_secret(key) or key.lower() in _IN_QUERY:
            secrets.append(text)
    before = ""
    for segment in parts.path.split("/"):
        key, _, text = segment.rpartition("=")
        named = names_secret(before) or names_secret(key) or key.lower() in _IN_QUERY
        if KEYLIKE.fullmatch(text) or (named and len(text) >= LEAST) or (path and _RANDOM.search(text)):
            secrets.append(text)
        before = segment
    for secret in secrets:
        add(secret, name)
        add(unquote_plus(secret), name)
        add(unquote(secret), name)


# ---
# Redacting.


def redact(text: str) -> str:
    """The text without secrets; the text itself, at little cost, if there are none in it."""
    for form, _, mark in _forms:
        if form in text:
            text = text.replace(form, mark)
    return text


def redact_value(value: Any, exact: Sequence[str] = ()) -> Any:
    """A copy of JSON-like data without secrets; `value` itself where there are none.

    Args:
        value: mappings, lists, texts and numbers.
        exact: keys of the outermost mapping that are left as they are.
    """
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, Mapping):
        return {redact_value(key): item if key in exact else redact_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [redact_value(item) for item in value]
    return value


def redact_settings(value: Any, name: str = "") -> Any:
    """As `redact_value`, for settings to be recorded: whatever is called a secret is one, however short."""
    if isinstance(value, Mapping):
        return {key: redact_settings(item, str(key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [redact_settings(item, name) for item in value]
    if isinstance(value, str) and value and names_secret(name) and _is_key(value) and not MARK.search(value):
        return f"(redacted {name})"
    return redact_value(value)


def redact_json(text: bytes, exact: Sequence[str] = (), *, indent: int | None = None) -> bytes:
    """A JSON text without secrets; its numbers stay numbers, and the keys `exact` keep their values.

    Args:
        text: one JSON value; of anything else, the text is redacted as it is.
        exact: see `redact_value`.
        indent: of the JSON that is written where there was a secret.
    """
    if not any(form in text for _, form, _ in _forms):
        return text
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return redact(text.decode("utf-8", "surrogateescape")).encode("utf-8", "surrogateescape")
    separators = (",", ":") if indent is None else None
    value = redact_value(value, exact)
    try:
        return json.dumps(value, indent=indent, separators=separators, ensure_ascii=False).encode()
    except UnicodeEncodeError:  # a surrogate without its other half
        return json.dumps(value, indent=indent, separators=separators).encode()


def marks(value: Any, name: str = "") -> Iterator[str]:
    """Dotted keys of settings that were redacted when they were recorded."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from marks(item, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from marks(item, f"{name}.{number}")
    elif isinstance(value, str) and MARK.search(value):
        yield name


# ---
# The console.


class RedactingStream:
    """A text stream that writes no secret; all else is the stream's own."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write the text without secrets."""
        self._stream.write(redact(text))
        return len(text)

    def writelines(self, lines: Sequence[str]) -> None:
        """Write each of the lines."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def redacting(stream: TextIO) -> TextIO:
    """The stream, which writes no secret from here on."""
    return stream if isinstance(stream, RedactingStream) else cast(TextIO, RedactingStream(stream))


@contextmanager
def console(arguments: Sequence[str] = ()) -> Iterator[None]:
    """Keep the secrets of the environment and of a command line out of stdout and stderr while the block runs."""
    learn_environment()
    learn_arguments(arguments)
    with redirect_stdout(redacting(sys.stdout)), redirect_stderr(redacting(sys.stderr)):
        yield
