"""Conversion between messages and tokens: a checkpoint folder's tokenizer and its model family's chat format.

The folder's own template (`trainers.model.template`) or the `renderers` library renders and parses. This module adapts
their types and enforces two rules. For exact trajectories, a turn's prompt extends the tokens of the previous turn (a
bridge); the conversation is rendered anew only if the format can't guarantee that (a fork, which is counted). For
safety, only the chat format itself writes control tokens; text that spells one is encoded as plain text, regardless of
its author.
"""

from __future__ import annotations

import itertools
import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from renderers import ParsedToolCall, ToolCallParseStatus, create_renderer
from renderers.configs import BaseRendererConfig, CustomRendererConfig, config_from_name
from renderers.custom import load_custom_renderer
from tokenizers import Tokenizer

from forge_env.config.recipe import ModelSection
from forge_env.endpoint.history import tools_as_text
from forge_env.errors import ChatFormatError, UsageError
from forge_env.reading import ANYWHERE, LARGEST_TABLE, read_text
from forge_env.tools.chat_template import ERRORS
from forge_env.tools.turns import call_of, is_malformed, malformed, read_call, read_turn, split_thoughts
from forge_env.types import FunctionCall, Message, ToolCall, ToolSpec
from trainers.model.folder import read_hf_config
from trainers.model.template import OPENING, TemplateFormat, chatml_format, folder_format

log = logging.getLogger(__name__)
CUT = "\ufdd0"
"""Inserted into text that spells a control token. Our tokenizers drop this character only after they have matched
control tokens, so a control token that contains it remains text, and nothing is matched across it. It is a Unicode
noncharacter, which text doesn't contain."""
SHORT, MOST_SHORT = 32, 4096
"""Maximum characters of a text whose tokens are cached, and maximum number of cached texts."""
MOST_TOOLSETS = 64
"""Maximum number of tool sets whose rendering is cached."""
UNREADABLE = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""Exceptions that the library's parsers raise for unexpected JSON: deep nesting, long numbers, names of other types."""
TAG = re.compile(r"<[^\s<>]+>")
"""Tokens of this form are treated as control tokens, even if the vocabulary doesn't mark them as special."""


class FolderTokenizer:
    """The `tokenizer.json` of a checkpoint folder, with the methods that `renderers` needs.

    Its `control_tokens` are texts of tokens that mean more than their text: special tokens, and tags such as
    `<tool_call>`, which many models have as tokens without marking them as special.
    """

    def __init__(self, folder: str | Path) -> None:
        path = Path(folder) / "tokenizer.json"
        if not path.is_file():
            raise UsageError(
                f"no tokenizer.json in {folder}", fix="model.path must be a Hugging Face checkpoint folder"
            )
        try:
            self._tokenizer = Tokenizer.from_str(_with_cuts(read_text(path, largest=LARGEST_TABLE, root=ANYWHERE)))
        except Exception as error:  # the library raises no narrower exception
            raise UsageError(f"{path} can't be read: {error}", fix="fetch the checkpoint again") from error
        added = self._tokenizer.get_added_tokens_decoder().values()
        self.control_tokens = [token.content for token in added if token.special or TAG.fullmatch(token.content)]
        self._short: dict[str, tuple[int, ...]] = {}
        """Token ids of short texts: every turn renders the format's fixed phrases."""
        self.name_or_path = str(folder)
        self.unk_token_id: int | None = None
        self.eos_token_id: int | None = self._tokenizer.token_to_id("<|im_end|>")

    @cached_property
    def vocab_size(self) -> int:
        """Number of token ids, added tokens included: the highest id plus 1, so that unused ids count."""
        return max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def encode(self, text: str, *args: Any, **kwargs: Any) -> list[int]:
        """Token ids of `text`, without added special tokens.

        Control tokens spelled in `text` are recognised unless they are cut (`CUT`).
        """
        if len(text) > SHORT:
            return list(self._tokenizer.encode(text, add_special_tokens=False).ids)
        ids = self._short.get(text)
        if ids is None:
            if len(self._short) >= MOST_SHORT:
                self._short.clear()
            ids = self._short[text] = tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)
        return list(ids)

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Token ids of `text`, and the first and last position (exclusive) of each token's text."""
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        return list(encoding.ids), list(encoding.offsets)

    def decode(self, token_ids: Any, *args: Any, **kwargs: Any) -> str:
        """Text of `token_ids`, including special tokens unless `skip_special_tokens` is set."""
        return str(
            self._tokenizer.decode(list(token_ids), skip_special_tokens=kwargs.get("skip_special_tokens", False))
        )

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        """Id of one token, or ids of a list; None for tokens that are not in the vocabulary."""
        if isinstance(tokens, str):
            return self._tokenizer.token_to_id(tokens)
        return [self._tokenizer.token_to_id(token) for token in tokens]


def _with_cuts(tokenizer_json: str) -> str:
    """Change a `tokenizer.json` so that `CUT` is dropped after control tokens are matched in the original text."""
    data = json.loads(tokenizer_json)
    for token in data.get("added_tokens", []):
        token["normalized"] = False  # otherwise it would also be matched after the normalizer
    drop = {"type": "Replace", "pattern": {"String": CUT}, "content": ""}
    rest = data.get("normalizer")
    data["normalizer"] = {"type": "Sequence", "normalizers": [drop, rest]} if rest else drop
    return json.dumps(data)


def chat_format(renderer: str, *, thinking: bool) -> BaseRendererConfig:
    """Configuration of a chat format of the `renderers` library, or of a class `module:Class` with its protocol.

    Raises:
        ValueError: there is no such format, or it can't turn on thinking.
    """
    values: dict[str, Any] = {}
    if ":" in renderer:
        try:
            fields = load_custom_renderer(renderer).config_class.model_fields
        except (ImportError, OSError, TypeError) as error:
            raise ValueError(f"{renderer!r} can't be loaded: {error}") from error
    else:
        config = config_from_name(renderer)
        assert config is not None, "`auto` is the folder's template"
        fields = type(config).model_fields
    switch = next((name for name in ("enable_thinking", "thinking") if name in fields), None)
    if switch is None and thinking:
        raise ValueError(f"the chat format {renderer!r} has no switch for thinking")
    # "all": later prompts contain all tokens of a turn, thoughts included, so episodes don't fork
    values = {"thinking_retention": "all"} | ({switch: thinking} if switch else {})
    return CustomRendererConfig(import_path=renderer, **values) if ":" in renderer else type(config)(**values)


class _Tools(NamedTuple):
    """Tools (referenced so that their `id()` is not reused), and their forms for parsing and for rendering.

    Control tokens that are spelled in the form for rendering are cut; both are None without tools.
    """

    specs: list[ToolSpec]
    plain: Any
    text: Any


class Chat:
    """Renders conversations to token ids, and parses sampled tokens into messages.

    Args:
        tokenizer: `FolderTokenizer`, or an object with its methods and `control_tokens`.
        renderer: a template's format, or the name of one in the `renderers` library, or `module:Class`.
        thinking: whether the model may think before it answers, if the library's format has that option.
        text_tools: whether to describe tools and their results as text, instead of in the format's own way.
    """

    def __init__(
        self,
        tokenizer: Any,
        renderer: str | TemplateFormat = "qwen3",
        *,
        thinking: bool = False,
        text_tools: bool = False,
    ) -> None:
        self.tokenizer = tokenizer
        self._as_text = text_only(tokenizer.control_tokens)
        self._toolsets: dict[tuple[int, ...], _Tools] = {}
        self._text_tools = text_tools
        self._template = renderer if isinstance(renderer, TemplateFormat) else None
        self._folder: TemplateFormat | None = None
        """The format of the template in the model's folder."""
        if isinstance(renderer, str):
            self._renderer = create_renderer(tokenizer, chat_format(renderer, thinking=thinking))
            question = [{"role": "user", "content": "?"}]
            plain = self._renderer.render_ids(question)
            opened = list(self._renderer.render_ids(question, add_generation_prompt=True))
            self._generation_prompt = opened[len(plain) :]

    @classmethod
    def of(cls, folder: str | Path, model: ModelSection) -> Chat:
        """Build the chat format of a recipe's model, with the tokenizer of a checkpoint folder."""
        tokenizer = FolderTokenizer(folder)
        known = read_hf_config(folder)["vocab_size"]
        if tokenizer.vocab_size > known:
            raise UsageError(
                f"the tokenizer in {folder} has {tokenizer.vocab_size} tokens, its model {known}",
                fix="use the tokenizer.json that the model was trained with",
            )
        return cls.named(
            model.renderer, Path(folder), tokenizer, thinking=model.thinking, text_tools=model.tools == "text"
        )

    @classmethod
    def named(
        cls, name: str, folder: Path, tokenizer: FolderTokenizer, *, thinking: bool, text_tools: bool = False
    ) -> Chat:
        """Build the chat format `name` (`model.renderer`).

        Raises:
            UsageError: there is no such format, or the folder can't write it.
        """
        if name != "auto":
            if name == "chatml":
                chat = cls(tokenizer, chatml_format(folder, tokenizer, thinking=thinking), text_tools=text_tools)
            else:
                chat = cls._of_library(name, tokenizer, thinking=thinking, text_tools=text_tools)
            with suppress(UsageError):  # a template that can't be used is not used
                chat._folder = folder_format(folder, tokenizer, thinking=thinking)
            return chat
        template = folder_format(folder, tokenizer, thinking=thinking)
        if template is None:
            raise UsageError(
                f"{folder} has no chat template (chat_template.jinja, or chat_template in tokenizer_config.json)",
                fix="copy that of the family's instruct model into it, or name a format: model.renderer=chatml",
            )
        own = cls(tokenizer, template, text_tools=text_tools)
        with suppress(UsageError, ValueError):  # its tokenizer lacks a token
            quick = cls._of_library("qwen3", tokenizer, thinking=thinking, text_tools=text_tools)
            if all(_frame(quick, *case) == _frame(own, *case) for case in _cases()):
                return quick
        return own

    @classmethod
    def _of_library(cls, name: str, tokenizer: FolderTokenizer, *, thinking: bool, text_tools: bool) -> Chat:
        try:
            return cls(tokenizer, name, thinking=thinking, text_tools=text_tools)
        except AssertionError as error:  # raised by the library if a token is missing
            raise UsageError(
                f"the tokenizer in {tokenizer.name_or_path} can't write the chat format {name!r}: {error}",
                fix="use model.renderer=auto, the model's own template, or the format of its family, such as llama-3",
            ) from error

    def refusal_of_tools(self) -> str | None:
        """The reason why tools can't be offered; None if they can."""
        if self._text_tools or self._template is None:
            return None
        reason = self._template.template.refusal_of_tools()
        return None if reason is None else f"{self._template.template.source} {reason}"

    @property
    def stop_token_ids(self) -> list[int]:
        """Tokens that end an assistant turn."""
        if self._template is not None:
            return self._template.stop_token_ids
        return [token for token in self._renderer.get_stop_token_ids() if token is not None]

    def render(self, messages: list[Message], tools: list[ToolSpec], *, generation: bool = True) -> list[int]:
        """Token ids of a conversation; with `generation`, they end with the opening of an assistant turn.

        Raises:
            ChatFormatError: the format can't represent the conversation.
        """
        plain, offered = self._messages(messages, tools), self._known(tools).text
        with _writing():
            if self._template is not None:
                return self._template.render(plain, offered, generation=generation)
            return list(self._renderer.render_ids(plain, tools=offered, add_generation_prompt=generation))

    def render_by_folder(self, messages: list[Message], tools: list[ToolSpec]) -> list[int] | None:
        """Token ids of a prompt as the template in the model's folder writes it, if another format is used.

        None if the template itself is used, if there is none, or if it can't write the prompt.
        """
        if self._folder is None:
            return None
        try:
            return self._folder.render(self._messages(messages, tools), self._known(tools).text, generation=True)
        except ERRORS:
            return None

    def render_training(self, messages: list[Message], tools: list[ToolSpec]) -> list[tuple[list[int], list[bool]]]:
        """Sequences of a demonstration: token ids, [T], and a mask of those that the assistant is to produce, [T].

        There is one, unless a template rewrites former turns; then each turn is in the mask of one sequence. Tokens of
        the generation prompt (the role, an empty thinking block) are not to be produced.

        Raises:
            ChatFormatError: the format can't represent the conversation.
        """
        plain, offered = self._messages(messages, tools), self._known(tools).text
        with _writing():
            if self._template is not None:
                return self._template.render_training(plain, offered)
            rendered = self._renderer.render(plain, tools=offered)
        ids, mask = list(rendered.token_ids), list(rendered.sampled_mask)
        opening = self._generation_prompt
        for start in range(len(ids) - len(opening) + 1):
            if ids[start] == opening[0] and ids[start : start + len(opening)] == opening:
                mask[start : start + len(opening)] = [False] * len(opening)
        return [(ids, mask)]

    def extend(
        self,
        prompt_ids: list[int],
        token_ids: list[int],
        history: list[Message],
        observation: list[Message],
        tools: list[ToolSpec],
    ) -> list[int] | None:
        """Build the next prompt, which begins with exactly `prompt_ids + token_ids`; None if the format can't do so.

        These are the last turn's prompt and sampled tokens. `history` ends with that turn; `observation` follows it.
        """
        plain, offered = self._messages(observation, []), self._known(tools).text
        with _writing():
            if self._template is not None:
                before = tools_as_text(history, tools) if self._text_tools else history
                return self._template.extend(prompt_ids, token_ids, before, plain, offered)
            bridged = self._renderer.bridge_to_next_turn(prompt_ids, token_ids, plain, tools=offered)
        return None if bridged is None else list(bridged.token_ids)

    def parse(self, token_ids: list[int], tools: list[ToolSpec], prompt_ids: list[int]) -> Message:
        """Parse sampled tokens into an assistant message; never fails (see `forge_env.tools.turns`).

        The prompt may end with an opening thought tag.
        """
        stops = set(self.stop_token_ids)
        sampled = list(itertools.takewhile(lambda token: token not in stops, token_ids))
        text = self.tokenizer.decode(sampled)
        if self._template is not None:
            return self._template.read(text, tools=bool(tools), native=not self._text_tools, prompt_ids=prompt_ids)
        opened = self.tokenizer.decode(prompt_ids[-OPENING:]).rstrip().endswith("<think>")
        if self._text_tools:
            return self._read_text(text, opened=opened, tools=bool(tools))
        try:
            parsed = self._renderer.parse_response(token_ids, tools=self._known(tools).plain, prompt_ids=prompt_ids)
        except UNREADABLE:
            rest = split_thoughts(text, opened=opened)[1]
            message = self._read_text(text, opened=opened, tools=bool(tools))
            if message.tool_calls or not tools or not rest.strip():
                return message
            return message.model_copy(update={"content": "", "tool_calls": [malformed(rest)]})
        content, reasoning = parsed.content, parsed.reasoning_content
        calls = [_call(call, f"call_{index}") for index, call in enumerate(parsed.tool_calls)]
        ours = self._read_text(text, opened=reasoning is not None, tools=bool(tools))
        unread = [call for call in calls if is_malformed(call)]
        repaired = "<tool_call>" in text and unread and not any(map(is_malformed, ours.tool_calls))
        if repaired or (not calls and text.count("</think>") > 1):  # the library ends blocks at the first closing tag
            return ours
        if calls and (not tools or _only_thought(text, reasoning)):
            thoughts, content = split_thoughts(text, opened=reasoning is not None)
            reasoning, calls = "\n".join(thoughts) if thoughts else None, []
        elif content == text.strip():
            content = text
        return read_turn(content, reasoning=reasoning, calls=calls, tools=bool(tools))

    def _read_text(self, text: str, *, opened: bool, tools: bool) -> Message:
        thoughts, rest = split_thoughts(text, opened=opened)
        return read_turn(rest, reasoning="\n".join(thoughts) if thoughts else None, tools=tools)

    def _messages(self, messages: Iterable[Message], tools: list[ToolSpec]) -> Any:
        messages = tools_as_text(messages, tools) if self._text_tools else list(messages)
        for message in messages:
            if message.images:
                fix = "evaluate a vision model at an endpoint, or show their contents as text"
                raise UsageError(f"a message of the {message.role} has images, and this model reads text only", fix=fix)
        return [self._as_text(message.to_openai()) for message in messages]

    def _known(self, tools: list[ToolSpec]) -> _Tools:
        """Tools in the renderer's forms, cached: they are the same for every turn, and mostly for every episode."""
        key = tuple(map(id, tools))
        toolset = self._toolsets.get(key)
        if toolset is None:
            if len(self._toolsets) >= MOST_TOOLSETS:
                self._toolsets.clear()
            plain = None if self._text_tools else [tool.to_openai() for tool in tools] or None
            toolset = self._toolsets[key] = _Tools(list(tools), plain, self._as_text(plain))
        return toolset


def token_reader(folder: Path, renderer: str) -> Chat | None:
    """The `Chat` of a checkpoint that a vLLM server serves; None if its tokenizer doesn't support the format."""
    try:
        return Chat.named(renderer, folder, FolderTokenizer(folder), thinking=False)
    except (UsageError, AssertionError, ValueError) as error:
        log.info("the turns of %s are read by the server's parsers: %s", folder, error)
        return None


def _cases() -> Iterator[tuple[list[Message], list[ToolSpec]]]:
    """Conversations that tell whether two formats write the same around the assistant's turns."""
    tools = [
        ToolSpec(name="f", description="d", parameters={"type": "object", "properties": {"a": {"type": "string"}}})
    ]
    system, question = Message(role="system", content="s"), Message(role="user", content="q")
    call = ToolCall(id="call_0", function=FunctionCall(name="f", arguments='{"a": "b"}'))
    turn = Message(role="assistant", content="", tool_calls=[call])
    result = Message(role="tool", content="r", tool_call_id="call_0")
    for messages in ([question], [system, question], [question, turn, result, result]):
        yield messages, []
        yield messages, tools


def _frame(chat: Chat, messages: list[Message], tools: list[ToolSpec]) -> list[int] | None:
    """The tokens of a prompt, without those before its last turn and those that the assistant writes."""
    try:
        ids = chat.render(messages, tools)
    except ChatFormatError:
        return None
    turns = [index for index, token in enumerate(ids) if token in chat.stop_token_ids]
    return ids[turns[-2] :] if messages[-1].role == "tool" else ids


def _call(call: ParsedToolCall, call_id: str) -> ToolCall:
    """Convert a call that the library parsed, completely or in part."""
    call_id, raw = call.id or call_id, call.raw
    if not call.name:
        return read_call(raw, call_id)  # also reads a complete call without its closing tag
    cut = call.status in (ToolCallParseStatus.UNCLOSED_BLOCK, ToolCallParseStatus.MALFORMED_STRUCTURE)
    unread = call.status != ToolCallParseStatus.OK and call.arguments is None
    return call_of(call.name, raw if cut or unread else call.arguments, call_id, raw=raw)


def _only_thought(text: str, reasoning: str | None) -> bool:
    """Whether the calls are part of thoughts that were never closed.

    The library takes the first call as the end of the thoughts.
    """
    return reasoning is not None and "</think>" not in text and not split_thoughts(text, opened=True)[1]


@contextmanager
def _writing() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # the library raises many types for unsupported content
        raise ChatFormatError(f"the chat format can't write this conversation: {error}") from error


def text_only(control_tokens: Iterable[str]) -> Callable[[Any], Any]:
    """Return a function that cuts (`CUT`) spelled control tokens in all strings of a JSON value, keys included."""
    longest_first = sorted(filter(lambda token: len(token) > 1, control_tokens), key=len, reverse=True)
    if not longest_first:
        return lambda value: value
    # matches at the start of every control token, including overlapping ones
    begins = re.compile(f"(?=(?:{'|'.join(map(re.escape, longest_first))}))(.)", re.DOTALL)

    def cut(value: Any) -> Any:
        if isinstance(value, str):
            return begins.sub(rf"\1{CUT}", value)
        if isinstance(value, dict):
            return {cut(key): cut(item) for key, item in value.items()}
        return [cut(item) for item in value] if isinstance(value, list) else value

    return cut
