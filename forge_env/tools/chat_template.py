"""A model's chat template, rendered as `transformers` renders it.

A template is a Jinja program from the model's author. It runs in a sandbox with limits on time and size, because the
author may be a stranger.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from datetime import datetime
from hashlib import blake2b
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from forge_env.errors import UsageError
from forge_env.reading import ANYWHERE, LARGEST_TABLE, UnsafeFileError, read_json, read_text
from forge_env.tools.call_syntax import SYNTAXES, CallSyntax
from forge_env.tools.turns import split_thoughts

SECONDS = 10.0
"""Maximum time of one rendering, in seconds of the thread's CPU time."""
LARGEST = 1 << 26
"""Maximum size of a rendered text and of every value on the way, in characters."""
LARGEST_NUMBER = 10_000
"""Maximum width, indentation or count that a template may pass to a method or filter of a text."""
TICKS = 256
"""Rounds of loops between two looks at the clock."""
ERRORS = (jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""Exceptions that templates raise for conversations that they can't write."""
CHATML = Path(__file__).with_name("chatml.jinja")
"""Template of the format `chatml`."""
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
PROBE = "Zqxprobe"
"""Text in conversations that show how a template writes; letters only, so that no template changes it."""
PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": "get_probe",
        "description": "Get a probe.",
        "parameters": {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]},
    },
}


class ChatTemplate:
    """The chat template of a checkpoint folder.

    Args:
        templates: templates by name: `default`, and possibly `tool_use` for conversations with tools.
        special_tokens: the tokenizer's special tokens by name, such as `bos_token`, which templates may write.
        source: file of the templates, for error messages.

    Raises:
        UsageError: a template is not valid Jinja.
    """

    def __init__(self, templates: Mapping[str, str], special_tokens: Mapping[str, str], source: str) -> None:
        self.source = source
        self.text = templates["default"]
        self._special_tokens = dict(special_tokens)
        environment = _Sandbox()
        try:
            self._templates = {name: environment.compiled(text) for name, text in templates.items()}
        except (jinja2.TemplateError, RecursionError) as error:
            raise UsageError(
                f"the chat template in {source} can't be compiled: {error}",
                fix="fetch the checkpoint again, or name a chat format: model.renderer=chatml",
            ) from error

    @classmethod
    def of(cls, folder: Path) -> ChatTemplate | None:
        """Read the template of a checkpoint folder; None if it has none.

        Raises:
            UsageError: the template is not valid Jinja, or none of several has the name `default`.
        """
        settings = settings_in(folder / "tokenizer_config.json")
        special = settings_in(folder / "special_tokens_map.json") | settings
        tokens = {name: _token(special[name]) for name in SPECIAL_TOKENS if special.get(name) is not None}
        file = folder / "chat_template.jinja"
        if file.is_file():
            others = (folder / "additional_chat_templates").glob("*.jinja")
            named = {other.stem: read_text(other, root=ANYWHERE) for other in sorted(others)}
            return cls(named | {"default": read_text(file, root=ANYWHERE)}, tokens, str(file))
        for file in (folder / "tokenizer_config.json", folder / "chat_template.json"):  # processors have the latter
            if listed := settings_in(file).get("chat_template"):
                return cls(_named(listed, file), tokens, str(file))
        return None

    @classmethod
    def chatml(cls) -> ChatTemplate:
        """ChatML with the tools of Hermes and Qwen."""
        return cls({"default": CHATML.read_text(encoding="utf-8")}, {}, "the chat format chatml")

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        generation: bool = False,
        **options: Any,
    ) -> str:
        """Text of a conversation, with special tokens spelled out.

        Messages and tools are in OpenAI's format; arguments of calls are parsed, as templates expect them. `generation`
        adds the opening of an assistant turn. `options` are further variables, such as `enable_thinking`.

        Raises:
            TemplateError: the template rejects a conversation, leaves out calls, or exceeds a limit; see also `ERRORS`.
        """
        calls = max((len(message.get("tool_calls") or ()) for message in messages), default=0)
        most = self._most_calls[bool(tools)] if calls else None
        if most is not None and calls > most:
            split = "put each call in a separate message, or " if most else ""
            raise jinja2.TemplateError(
                f"{self.source} writes {most} of the {calls} tool calls in a message: {split}use model.tools=text"
            )
        template = self._templates.get("tool_use" if tools else "default", self._templates["default"])
        variables = self._special_tokens | options
        settings = {"short_ids": self._short_ids, "only_objects": self._only_objects}
        prepared = [_prepared(message, self._thoughts, **settings) for message in messages]
        given = {"messages": prepared, "tools": tools or None, "documents": None}
        return _render(template, **given, add_generation_prompt=generation, **variables)

    def refusal_of_tools(self) -> str | None:
        """The reason why this template can't be used for native tools; None if it can."""
        return self._tool_use[1]

    @property
    def call_syntax(self) -> CallSyntax | None:
        """How the model writes a call, read from an example; None if the template writes none, or in an unknown way."""
        return self._tool_use[0]

    @functools.cached_property
    def _most_calls(self) -> dict[bool, int | None]:
        """Maximum calls in a message with and without tools, if the template silently leaves out the others; else None.

        The two may differ, because conversations with tools may have another template.
        """
        self.__dict__["_most_calls"] = most = dict[bool, int | None].fromkeys((False, True))  # while `_try` renders
        last = _call("call00001", PROBE, json.dumps({"key": PROBE}))
        for count, calls in enumerate(([last], [_call("call00000"), last])):
            for tools in (False, True):
                message = {"role": "assistant", "content": "", "tool_calls": calls}
                text = self._try([*_asked(), message], [PROBE_TOOL] if tools else None)
                if most[tools] is None and text is not None and PROBE not in text:
                    most[tools] = count
        return most

    @functools.cached_property
    def _short_ids(self) -> bool:
        """Whether ids of calls must have nine letters and digits, as Mistral's templates demand."""
        self.__dict__["_short_ids"] = False  # while the conversations below are rendered
        if self._try([*_asked(), *_called("call_0")]) is not None:
            return False
        return self._try([*_asked(), *_called("call00000")]) is not None

    @functools.cached_property
    def _only_objects(self) -> bool:
        """Whether the template refuses arguments that are text, as those of a call that could not be parsed are."""
        self.__dict__["_only_objects"] = False  # while the conversations below are rendered
        if self._try([*_asked(), *_called("call00000", arguments="text")]) is not None:
            return False
        return self._try([*_asked(), *_called("call00000")]) is not None

    @functools.cached_property
    def _thoughts(self) -> str:
        """Key of a message's thoughts in the template."""
        self.__dict__["_thoughts"] = default = "reasoning_content"  # used by `_try` below
        for key in (default, "reasoning", "thinking"):
            if PROBE in (self._try([*_asked(), {"role": "assistant", "content": "", key: PROBE}]) or ""):
                return key
        return default

    @functools.cached_property
    def _tool_use(self) -> tuple[CallSyntax | None, str | None]:
        """How the model writes calls, and the reason why it can't be given tools."""
        asked, tools = _asked(), [PROBE_TOOL]
        shown = whole = ""
        for thinking in ({}, {"enable_thinking": True}):  # if off, the prompt may have thoughts that the turn lacks
            shown = self._try(asked, tools, generation=True, **thinking) or ""
            if "get_probe" not in shown:
                return None, "doesn't show tools to the model"
            whole = self._try([*asked, *_called("call_0")], tools, **thinking) or ""
            if whole.startswith(shown):
                break
        call, answer, _ = whole.removeprefix(shown).partition(PROBE)
        if "get_probe" not in call or not whole.startswith(shown):
            return None, "can't write a tool call"
        if not answer:
            return None, "doesn't show a tool's answer to the model"
        syntax = next((syntax for syntax in SYNTAXES if syntax.reads_probe(split_thoughts(call)[1])), None)
        return syntax, None if syntax else "writes tool calls in a syntax that forge-env can't read"

    def _try(self, messages: list[dict[str, Any]], tools: Any = None, **options: Any) -> str | None:
        try:
            return self.render(messages, tools, **options)
        except ERRORS:
            return None


def _named(listed: Any, file: Path) -> dict[str, str]:
    """Templates by name from the value of `chat_template` in a file: one template, or several with names."""
    if isinstance(listed, list):
        listed = {each.get("name"): each.get("template") for each in listed if isinstance(each, dict)}
    given = listed if isinstance(listed, dict) else {"default": listed}
    named = {str(name): text for name, text in given.items() if isinstance(text, str)}
    if "default" not in named:
        raise UsageError(
            f"{file} has no default chat template; its templates are: {', '.join(named) or 'none'}",
            fix="copy one to chat_template.jinja in the folder",
        )
    return named


def _asked() -> list[dict[str, Any]]:
    return [{"role": "user", "content": "?"}]


def _call(call_id: str, name: str = "get_probe", arguments: str = '{"key": "value"}') -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _called(call_id: str, **call: str) -> list[dict[str, Any]]:
    return [
        {"role": "assistant", "content": "", "tool_calls": [_call(call_id, **call)]},
        {"role": "tool", "content": PROBE, "tool_call_id": call_id, "name": "get_probe"},
    ]


def _prepared(message: Mapping[str, Any], thoughts: str, *, short_ids: bool, only_objects: bool) -> dict[str, Any]:
    """A message in the form that templates expect."""
    data = {thoughts if key == "reasoning_content" else key: value for key, value in message.items()}
    if data.get("tool_calls"):
        settings = {"short_ids": short_ids, "only_objects": only_objects}
        data["tool_calls"] = [_prepared_call(call, **settings) for call in data["tool_calls"]]
    if short_ids and data.get("tool_call_id") is not None:
        data["tool_call_id"] = _short(data["tool_call_id"])
    return data


def _prepared_call(call: Mapping[str, Any], *, short_ids: bool, only_objects: bool) -> dict[str, Any]:
    function = dict(call["function"])
    if isinstance(function["arguments"], str):
        try:
            arguments = json.loads(function["arguments"])
        except (ValueError, RecursionError):
            arguments = None
        if isinstance(arguments, dict):
            function["arguments"] = arguments
        elif only_objects:
            function["arguments"] = {"arguments": function["arguments"]}
    return {**call, "function": function} | ({"id": _short(call["id"])} if short_ids else {})


def _short(call_id: str) -> str:
    if len(call_id) == 9 and call_id.isalnum():
        return call_id
    return blake2b(call_id.encode(), digest_size=8).hexdigest()[:9]


def _token(value: Any) -> str:
    return str(value["content"] if isinstance(value, dict) else value)


def settings_in(file: Path) -> dict[str, Any]:
    """The object in a JSON file of a model's folder; empty if there is none that can be read."""
    try:
        data = read_json(file, largest=LARGEST_TABLE, root=ANYWHERE)
    except (OSError, ValueError, UnsafeFileError):
        return {}
    return data if isinstance(data, dict) else {}


# --- the sandbox


class _Budget:
    """Time that is left to a rendering."""

    __slots__ = ("ends", "ticks")

    def __init__(self) -> None:
        self.ends = time.thread_time() + SECONDS
        self.ticks = 0


_budget: ContextVar[_Budget] = ContextVar("budget of a rendering")


def _render(template: jinja2.Template, **variables: Any) -> str:
    token = _budget.set(_Budget())
    try:
        parts, size = [], 0
        for part in template.generate(**variables):
            size += len(part)
            _fits(size)
            parts.append(part)
        return "".join(parts)
    finally:
        _budget.reset(token)


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja as `transformers` sets it up, with limits on time and size."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"])
        now = datetime.now()  # of the start: prompts of one run have one date
        self.globals |= {"raise_exception": _refuse, "strftime_now": now.strftime}
        del self.globals["lipsum"]
        self.filters["tojson"] = _tojson
        for name in ("batch", "center", "indent", "slice", "truncate", "wordwrap"):
            self.filters[name] = _with_small_numbers(self.filters[name])
        self.filters["join"] = _sized_join(self.filters["join"])
        self.filters["replace"] = _sized_replace(self.filters["replace"])
        del self.filters["format"]

    def compiled(self, source: str) -> jinja2.Template:
        """Compile a template whose loops look at the clock."""
        tree: Any = _Limits().visit(self.parse(source))
        tree.set_environment(self)
        code: Any = self.compile(tree)
        return self.template_class.from_code(self, code, self.make_globals(None))

    def tick(self) -> bool:
        """Count a round of a loop. `SecurityError`: the rendering takes too long."""
        budget = _budget.get()
        budget.ticks += 1
        if budget.ticks % TICKS == 0 and time.thread_time() > budget.ends:
            raise SecurityError(f"the chat template takes more than {SECONDS:g} s")
        return True

    def joined(self, *values: Any) -> str:
        """The operator `~`."""
        texts = [str(value) for value in values]
        _fits(sum(map(len, texts)))
        return "".join(texts)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Refuse `str.format`, whose widths have no limit."""
        if super().wrap_str_format(value) is not None:
            raise SecurityError("a chat template can't format texts with format()")
        return None

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Evaluate an operator that can make large values."""
        if operator == "+" and isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
            _fits(len(left) + len(right))
        elif operator == "*":
            for value, count in ((left, right), (right, left)):
                if isinstance(value, str | list | tuple) and isinstance(count, int):
                    _fits(len(value) * count)
        elif operator == "**":
            _small([left, right], 64)
        elif operator == "%" and isinstance(left, str):
            raise SecurityError("a chat template can't format texts with %")
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a function or method; methods of texts can make large values."""
        owner = getattr(obj, "__self__", None)
        if isinstance(owner, str):
            _small([*args, *kwargs.values()])
            if obj.__name__ == "replace" and len(args) > 1:
                _fits(len(owner) + owner.count(args[0]) * len(args[1]))
            elif obj.__name__ == "join" and args:
                args = ([str(value) for value in args[0]],)
                _fits(sum(map(len, args[0])) + len(owner) * len(args[0]))
        return super().call(context, obj, *args, **kwargs)


class _Generation(Extension):
    """The tag `{% generation %}`, which marks the assistant's text and writes nothing."""

    tags = {"generation"}  # jinja2 declares it without ClassVar

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Parse the tag's body."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Limits(NodeTransformer):
    """Adds a look at the clock to every round of a loop or macro, and a look at the size to every `~`."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        tick = _method("tick", [], node.lineno)
        node.body.insert(0, nodes.ExprStmt(tick, lineno=node.lineno))
        if node.test is not None:
            node.test = nodes.And(tick, node.test, lineno=node.lineno)
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_method("tick", [], node.lineno), lineno=node.lineno))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _method("joined", node.nodes, node.lineno)


def _method(name: str, arguments: list[nodes.Expr], line: int) -> nodes.Call:
    """A call of a method of the environment, which no template can name or replace."""
    return nodes.Call(nodes.EnvironmentAttribute(name, lineno=line), arguments, [], None, None, lineno=line)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _fits(size: int) -> None:
    if size > LARGEST:
        raise SecurityError(f"the chat template writes more than {LARGEST:,} characters")


def _small(values: Iterable[Any], largest: int = LARGEST_NUMBER) -> None:
    if any(isinstance(value, int | float) and abs(value) > largest for value in values):
        raise SecurityError(f"the chat template uses a number above {largest:,}")


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """JSON without HTML escapes, with the arguments of `transformers`."""
    _small([indent])
    if isinstance(indent, str) or len("".join(separators or ())) > 8:
        raise SecurityError("the chat template uses an unusual indentation or separator of JSON")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _with_small_numbers(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        _small([*args, *kwargs.values()])
        return function(*args, **kwargs)

    return checked


def _sized_join(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def checked(context: Any, value: Any, d: str = "", attribute: Any = None) -> Any:
        values = list(value)
        _fits(sum(len(str(each)) for each in values) + len(d) * len(values))
        return function(context, values, d, attribute)

    return checked


def _sized_replace(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def checked(context: Any, s: Any, old: str, new: str, count: int | None = None) -> Any:
        s = str(s)
        _fits(len(s) + s.count(old) * len(new))
        return function(context, s, old, new, count)

    return checked
