"""Redaction of secrets: files, logs and the terminal show `(redacted NAME)` instead of a secret.

Secrets are registered when they are read (`add`, `learn`), and all code that writes text redacts it: `forge_env.files`
(every file of a run or an evaluation), `forge_env.logs`, the console of the command line (`console`), and
`forge_env.visible`. A secret is replaced in plain text and in its JSON, URL, HTML, hexadecimal and base64 encodings,
also within a longer encoded text ("Basic USER:KEY"). Token ids are never changed, so training uses exactly the sampled
tokens.
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
"""Minimum length of a secret that is replaced everywhere. Shorter secrets are replaced only in `Bearer SECRET`, because
a placeholder such as "EMPTY" is part of many words."""
LEAST_LINE = 16
"""Minimum length of a line that is replaced on its own, in a secret of several lines."""
MARK = re.compile(r"\(redacted [^()\s]+\)")
"""Pattern of the replacement text, which needs no quoting in JSON, YAML, HTML and a rich console."""
NAMED = re.compile(
    r"(?:^|[_.-])(?:(?:api|access|private|secret|auth|account|subscription|signing|encryption|master)[_-]?key"
    r"|pass(?:word|wd|phrase)?|secret|token|credentials?|authorization|cookie|(?<=_)(?:pwd|pat|sas))$"
)
"""Pattern of lower-case names of settings whose values are secrets."""
VARIABLE = re.compile(rf"{NAMED.pattern}|_(?:key|auth)$|password$|apikey$")
"""Pattern of lower-case names of environment variables whose values are secrets."""
KEYLIKE = re.compile(
    r"(?<![\w-])(?:(?:sk|pk|rk|xai|glpat|nvapi|pplx|csk|xoxb|xoxp)-|(?:sk|hf|gsk|gh[posu]|github_pat|r8|rpa)_|A(?:KIA|Iza))"
    r"(?=[\w-]*[A-Z0-9])[\w-]{8,}"
)
"""Pattern of keys that are recognizable by their issuer's format."""
_IN_QUERY = ("key", "sig", "signature", "code", "auth")
_RANDOM = re.compile(r"(?=[^\W_]*\d)(?=[^\W_]*[A-Za-z])[^\W_]{16,}|[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_PAIR = re.compile(r"""([\w.-]+)["']?\s*[:=]\s*["']?([^\s,"'{}\[\]]+)""")
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")

_names: dict[str, str] = {}
"""Names of the secrets by value."""
_forms: list[tuple[str, bytes, str]] = []
"""Replacements, longest first: text, its UTF-8 encoding, and the replacement text."""


# ---
# Registering secrets.


def add(value: str, name: str) -> None:
    """Register a secret, to be redacted in all text written from now on."""
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
    """All encodings of a secret that are replaced."""
    lines = [line for line in value.splitlines() if len(line) >= LEAST_LINE and "-----" not in line]
    forms = {form for text in (value, *lines) for form in (text, json.dumps(text)[1:-1], html.escape(text))}
    forms |= {json.dumps(value, ensure_ascii=False)[1:-1], repr(value)[1:-1], quote_plus(value)}
    forms |= {quote(value, safe=safe) for safe in ("", "/", "/!$&'()*+,;=:@?")}  # as encoded in queries and paths
    forms |= {json.dumps(form)[1:-1] for form in forms}  # a tool call's arguments are JSON in JSON
    content = value.encode("utf-8", "surrogatepass")
    forms |= {content.hex(), content.hex().upper()}
    for encoded in (base64.b64encode, base64.urlsafe_b64encode):
        forms.add(encoded(content).decode().rstrip("="))
        for before in range(3):  # number of preceding bytes in its first base64 group of three
            text = encoded(bytes(before) + content).decode()
            depends = 1 + text.count("=") if text.endswith("=") else 0  # characters that depend on the following bytes
            forms.add(text[(0, 2, 3)[before] : len(text) - depends])
    return {form for form in forms if len(form) >= LEAST}


def names_secret(name: str) -> bool:
    """Whether a setting of this name contains a secret: `api_key`, `judge.apiKey`, `X-Auth-Token`."""
    return NAMED.search(_CAMEL.sub("_", name).lower()) is not None


def learn(value: Any, name: str = "") -> None:
    """Register the secrets in settings, recognized by name, by format, or as part of a URL."""
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
            with suppress(ValueError):  # not base64 or not UTF-8
                add(base64.b64decode(credentials, validate=True).decode().partition(":")[2], name)
        if names_secret(name) and _is_key(value):
            add(value, name)
        for key in KEYLIKE.finditer(value):
            add(key[0], name)
        if "://" in value:
            learn_address(value, name)


def _is_key(value: str) -> bool:
    """Whether the value of a setting with a secret's name may be a secret; `<|end|>` and existing paths are not."""
    return not re.fullmatch(r"<.*>|\[.*\]", value) and not os.path.exists(value)


def learn_arguments(arguments: Sequence[str]) -> None:
    """Register the secrets of a command line: `--api-key VALUE`, `--extra.token=VALUE`, `api_key=VALUE`, URLs."""
    previous = ""
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if equals and "://" not in name:
            learn(value, name.lstrip("-").replace("-", "_"))
        elif previous.startswith("-"):
            learn(argument, previous.lstrip("-").replace("-", "_"))
        elif not argument.startswith("-"):
            learn(argument, "argument")
        for pair in _PAIR.finditer(argument):  # possibly YAML
            learn(pair[2], pair[1])
        previous = argument


def learn_environment() -> None:
    """Register environment variables with the name of a secret, and passwords in the URLs of others."""
    for name, value in os.environ.items():
        if VARIABLE.search(name.lower()) and _is_key(value):
            add(value, name)
        elif "://" in value:
            learn_address(value, name)


def learn_address(address: str, name: str, *, path: bool = False) -> None:
    """Register the secrets of a URL: its password, and keys in its query or path.

    Args:
        path: whether random-looking parts of the path are secrets too.
    """
    try:
        parts = urlsplit(address.strip())
        password = parts.password or (parts.username if parts.scheme not in ("ssh", "git") else None)
    except ValueError:  # an invalid URL is reported elsewhere
        return
    secrets = [password] if password else []
    for key, _, text in (pair.partition("=") for pair in parts.query.split("&")):
        if names_secret(key) or key.lower() in _IN_QUERY:
            secrets.append(text)
    previous = ""
    for segment in parts.path.split("/"):
        key, _, text = segment.rpartition("=")
        named = names_secret(previous) or names_secret(key) or key.lower() in _IN_QUERY
        if KEYLIKE.fullmatch(text) or (named and len(text) >= LEAST) or (path and _RANDOM.search(text)):
            secrets.append(text)
        previous = segment
    for secret in secrets:
        add(secret, name)
        add(unquote_plus(secret), name)
        add(unquote(secret), name)


# ---
# Redacting.


def redact(text: str) -> str:
    """Redact the secrets in a text; cheap if it has none, and returns the same object then."""
    for form, _, mark in _forms:
        if form in text:
            text = text.replace(form, mark)
    return text


def redact_value(value: Any, exact: Sequence[str] = ()) -> Any:
    """Copy JSON-like data with secrets redacted.

    Args:
        exact: keys of the outermost mapping whose values are not redacted.
    """
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, Mapping):
        return {redact_value(key): item if key in exact else redact_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [redact_value(item) for item in value]
    return value


def redact_settings(value: Any, name: str = "") -> Any:
    """Redact settings for recording: like `redact_value`, but also values of any length with a secret's name."""
    if isinstance(value, Mapping):
        return {key: redact_settings(item, str(key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [redact_settings(item, name) for item in value]
    if isinstance(value, str) and value and names_secret(name) and _is_key(value) and not MARK.search(value):
        return f"(redacted {name})"
    return redact_value(value)


def redact_json(text: bytes, exact: Sequence[str] = (), *, indent: int | None = None) -> bytes:
    """Return a JSON text with secrets redacted; numbers stay numbers, and the values of the keys `exact` are unchanged.

    Args:
        indent: indentation of the JSON if it is rewritten because of a secret.
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
    except UnicodeEncodeError:  # an unpaired surrogate
        return json.dumps(value, indent=indent, separators=separators).encode()


def redacted_keys(value: Any, name: str = "") -> Iterator[str]:
    """Yield the dotted keys of settings that were redacted when recorded."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from redacted_keys(item, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from redacted_keys(item, f"{name}.{number}")
    elif isinstance(value, str) and MARK.search(value):
        yield name


# ---
# The console.


class RedactingStream:
    """Wrapper of a text stream that redacts secrets on writing."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write the text with secrets redacted."""
        self._stream.write(redact(text))
        return len(text)

    def writelines(self, lines: Sequence[str]) -> None:
        """Write each of the lines."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def redacting(stream: TextIO) -> TextIO:
    """Wrap a stream so that it redacts secrets; a wrapped stream is returned unchanged."""
    return stream if isinstance(stream, RedactingStream) else cast(TextIO, RedactingStream(stream))


@contextmanager
def console(arguments: Sequence[str] = ()) -> Iterator[None]:
    """Redact the secrets of the environment and the command line in stdout and stderr while the block runs."""
    learn_environment()
    learn_arguments(arguments)
    with redirect_stdout(redacting(sys.stdout)), redirect_stderr(redacting(sys.stderr)):
        yield
