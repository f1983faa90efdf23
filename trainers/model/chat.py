"""Between messages and tokens: the tokenizer of a checkpoint folder and the chat format of its model family.

Rendering and parsing are the `renderers` library's; this module adapts its types to ours and holds two rules.
What makes trajectories exact: a turn's prompt continues the tokens of the turn before it (bridge), and only when the
format can't prove that is the conversation rendered anew (a fork, which is counted). What makes them safe: only the
chat format itself writes control tokens. Text that spells one, whoever wrote it, is text.
"""

from __future__ import annotations

import itertools
import json
import logging
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from forge_env.config.recipe import ModelSection
from forge_env.errors import ChatFormatError, UsageError
from forge_env.reading import ANYWHERE, LARGEST_TABLE, read_text
from forge_env.turns import call_of, is_malformed, malformed, read_call, read_turn, split_thoughts
from forge_env.types import Message, ToolCall, ToolSpec
from trainers.model.folder import read_hf_config


@contextmanager
def _without_openai() -> Iterator[None]:
    """Import `renderers` in here: its client names a class of openai's in signatures, and that library takes a second.

    Whoever imports openai afterwards gets the real one.
    """
    if "openai" in sys.modules:
        yield
        return
    stub: Any = ModuleType("openai")
    stub.AsyncOpenAI = object
    sys.modules["openai"] = stub
    try:
        yield
    finally:
        del sys.modules["openai"]


with _without_openai():
    from renderers import ParsedToolCall, ToolCallParseStatus, create_renderer
    from renderers.configs import BaseRendererConfig, config_from_name

log = logging.getLogger(__name__)
CUT = "\ufdd0"
"""Dropped by our tokenizers after they have looked for control tokens: one that has it inside is text, and nothing is
matched across it. A code point that is not a character, so that no text has it."""
SHORT, MOST_SHORT = 32, 4096
"""Characters of a text whose tokens are remembered, and how many are."""
MOST_TOOLSETS = 64
"""Sets of tools whose rendering is remembered."""
UNREADABLE = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""Exceptions of the library's parsers for unexpected JSON: deep nesting, long numbers, names of other types."""
OPENING = 8
"""Tokens at the end of a prompt that are searched for an opening thought tag."""
TAG = re.compile(r"<[^\s<>]+>")
"""A token of this form is taken for a control token, whatever its vocabulary calls it."""


class FolderTokenizer:
    """The `tokenizer.json` of a checkpoint folder behind the small surface that `renderers` needs.

    Attributes:
        control_tokens: what is written as one token that means more than its text: the special ones, and tags such as
            `<tool_call>`, which many models have as tokens without calling them special.
    """

    def __init__(self, folder: str | Path) -> None:
        path = Path(folder) / "tokenizer.json"
        if not path.is_file():
            raise UsageError(
                f"no tokenizer.json in {folder}", fix="model.path must be a Hugging Face checkpoint folder"
            )
        try:
            self._tokenizer = Tokenizer.from_str(_with_cuts(read_text(path, largest=LARGEST_TABLE, root=ANYWHERE)))
        except Exception as error:  # boundary of the library, which raises nothing narrower
            raise UsageError(f"{path} can't be read: {error}", fix="fetch the checkpoint again") from error
        added = self._tokenizer.get_added_tokens_decoder().values()
        self.control_tokens = [token.content for token in added if token.special or TAG.fullmatch(token.content)]
        self._short: dict[str, tuple[int, ...]] = {}
        """Of short texts: a format's own phrases are rendered with every turn."""
        self.name_or_path = str(folder)
        self.unk_token_id: int | None = None
        self.eos_token_id: int | None = self._tokenizer.token_to_id("<|im_end|>")

    @cached_property
    def vocab_size(self) -> int:
        """Tokens in the vocabulary, added ones included; ids that are left out below the last one count."""
        return max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def encode(self, text: str, *args: Any, **kwargs: Any) -> list[int]:
        """Token ids of `text`; control tokens written out in it are recognised unless cut (`CUT`), none are added."""
        if len(text) > SHORT:
            return list(self._tokenizer.encode(text, add_special_tokens=False).ids)
        ids = self._short.get(text)
        if ids is None:
            if len(self._short) >= MOST_SHORT:
                self._short.clear()
            ids = self._short[text] = tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)
        return list(ids)

    def decode(self, token_ids: Any, *args: Any, **kwargs: Any) -> str:
        """Text of `token_ids`, special tokens included unless told otherwise."""
        return str(
            self._tokenizer.decode(list(token_ids), skip_special_tokens=kwargs.get("skip_special_tokens", False))
        )

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        """Id of one token, or ids of a list; None for what is not in the vocabulary."""
        if isinstance(tokens, str):
            return self._tokenizer.token_to_id(tokens)
        return [self._tokenizer.token_to_id(token) for token in tokens]


def _with_cuts(tokenizer_json: str) -> str:
    """A tokenizer that drops `CUT`, once control tokens are found in the text as it is written."""
    data = json.loads(tokenizer_json)
    for token in data.get("added_tokens", []):
        token["normalized"] = False  # else it would be looked for again, behind the normalizer
    drop = {"type": "Replace", "pattern": {"String": CUT}, "content": ""}
    rest = data.get("normalizer")
    data["normalizer"] = {"type": "Sequence", "normalizers": [drop, rest]} if rest else drop
    return json.dumps(data)


def chat_format(renderer: str, *, thinking: bool) -> BaseRendererConfig | None:
    """The configuration of a chat format of the `renderers` library.

    Raises:
        ValueError: there is no such format, or thinking can't be turned on in it.
    """
    config = config_from_name(renderer)
    if config is None:
        return None
    fields = type(config).model_fields
    switch = next((name for name in ("enable_thinking", "thinking") if name in fields), None)
    if switch is None and thinking:
        raise ValueError(f"the chat format {renderer!r} has no switch for thinking")
    # "all": a turn's tokens stay in the prompts after it, its thoughts too, so episodes don't fork
    values: dict[str, Any] = {"thinking_retention": "all"} | ({switch: thinking} if switch else {})
    return type(config)(**values)


class _Tools(NamedTuple):
    """Tools in the form that the renderer wants.

    Attributes:
        specs: themselves, kept so that nothing else gets their ids.
        plain: for parsing; None: no tools.
        text: for rendering: no control token is spelled in it.
    """

    specs: list[ToolSpec]
    plain: Any
    text: Any


class Chat:
    """Renders conversations to token ids and parses sampled tokens back into a message.

    Args:
        tokenizer: `FolderTokenizer`, or what has its methods and `control_tokens`.
        renderer: the chat format, by its name in the `renderers` library.
        thinking: whether the model may think before it answers, where the format leaves that open.
    """

    def __init__(self, tokenizer: Any, renderer: str = "qwen3", *, thinking: bool = False) -> None:
        self.tokenizer = tokenizer
        self._as_text = text_only(tokenizer.control_tokens)
        self._toolsets: dict[tuple[int, ...], _Tools] = {}
        self._renderer = create_renderer(tokenizer, chat_format(renderer, thinking=thinking))
        question = [{"role": "user", "content": "?"}]
        plain = self._renderer.render_ids(question)
        self._generation_prompt = list(self._renderer.render_ids(question, add_generation_prompt=True))[len(plain) :]

    @classmethod
    def of(cls, folder: str | Path, model: ModelSection) -> Chat:
        """The chat format of a recipe's model, with the tokenizer of a checkpoint folder.

        Raises:
            UsageError: the tokenizer lacks a token that the format needs, or has more tokens than the model.
        """
        tokenizer = FolderTokenizer(folder)
        known = read_hf_config(folder)["vocab_size"]
        if tokenizer.vocab_size > known:
            raise UsageError(
                f"the tokenizer in {folder} has {tokenizer.vocab_size} tokens, its model {known}",
                fix="use the tokenizer.json that the model was trained with",
            )
        try:
            return cls(tokenizer, model.renderer, thinking=model.thinking)
        except AssertionError as error:  # the library's way to say it
            raise UsageError(
                f"the tokenizer in {folder} can't write the chat format {model.renderer!r}: {error}",
                fix="model.renderer is the format of the model's family, such as qwen3 or llama-3",
            ) from error

    @property
    def stop_token_ids(self) -> list[int]:
        """Tokens that end an assistant turn."""
        return [token for token in self._renderer.get_stop_token_ids() if token is not None]

    def render(self, messages: list[Message], tools: list[ToolSpec], *, generation: bool = True) -> list[int]:
        """Token ids of a conversation; with `generation`, up to where the assistant begins to write.

        Raises:
            ChatFormatError: the format can't write it.
        """
        plain, offered = self._messages(messages), self._known(tools).text
        with _writing():
            return list(self._renderer.render_ids(plain, tools=offered, add_generation_prompt=generation))

    def render_training(self, messages: list[Message], tools: list[ToolSpec]) -> tuple[list[int], list[bool]]:
        """A demonstration's token ids, [T], and which of them the assistant is to produce, [T].

        What the generation prompt already holds (the role, an empty thinking block) is not to be produced.

        Raises:
            ChatFormatError: the format can't write it.
        """
        plain, offered = self._messages(messages), self._known(tools).text
        with _writing():
            rendered = self._renderer.render(plain, tools=offered)
        ids, mask = list(rendered.token_ids), list(rendered.sampled_mask)
        opening = self._generation_prompt
        for start in range(len(ids) - len(opening) + 1):
            if ids[start] == opening[0] and ids[start : start + len(opening)] == opening:
                mask[start : start + len(opening)] = [False] * len(opening)
        return ids, mask

    def extend(
        self, prompt_ids: list[int], token_ids: list[int], observation: list[Message], tools: list[ToolSpec]
    ) -> list[int] | None:
        """The next prompt, beginning with exactly `prompt_ids + token_ids`; None when the format can't promise it."""
        plain, offered = self._messages(observation), self._known(tools).text
        with _writing():
            bridged = self._renderer.bridge_to_next_turn(prompt_ids, token_ids, plain, tools=offered)
        return None if bridged is None else list(bridged.token_ids)

    def parse(self, token_ids: list[int], tools: list[ToolSpec], prompt_ids: list[int]) -> Message:
        """Parse sampled tokens into an assistant message; never fails (see `forge_env.turns`).

        Args:
            token_ids: sampled tokens.
            tools: tools that were offered.
            prompt_ids: tokens of the prompt, which may have opened the thoughts.
        """
        stops = set(self.stop_token_ids)
        sampled = list(itertools.takewhile(lambda token: token not in stops, token_ids))
        text = self.tokenizer.decode(sampled)
        try:
            parsed = self._renderer.parse_response(token_ids, tools=self._known(tools).plain, prompt_ids=prompt_ids)
        except UNREADABLE:
            opened = self.tokenizer.decode(prompt_ids[-OPENING:]).rstrip().endswith("<think>")
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

    def _messages(self, messages: Iterable[Message]) -> Any:
        messages = list(messages)
        for message in messages:
            if message.images:
                fix = "evaluate a model that sees behind an endpoint, or show what is in them as text"
                raise UsageError(f"a message of the {message.role} has images, and this model reads text only", fix=fix)
        return [self._as_text(message.to_openai()) for message in messages]

    def _known(self, tools: list[ToolSpec]) -> _Tools:
        """Tools as the renderer wants them: the same for every turn, and mostly for every episode."""
        key = tuple(map(id, tools))
        found = self._toolsets.get(key)
        if found is None:
            if len(self._toolsets) >= MOST_TOOLSETS:
                self._toolsets.clear()
            plain = [tool.to_openai() for tool in tools] or None
            found = self._toolsets[key] = _Tools(list(tools), plain, self._as_text(plain))
        return found


def token_reader(folder: Path, renderer: str) -> Callable[[list[int], list[ToolSpec], list[int]], Message] | None:
    """`Chat.parse` for a checkpoint that a vLLM server samples; None if its tokenizer doesn't support the format."""
    try:
        return Chat(FolderTokenizer(folder), renderer).parse
    except (UsageError, AssertionError, ValueError) as error:
        log.info("the turns of %s are read by the server's parsers: %s", folder, error)
        return None


def _call(call: ParsedToolCall, call_id: str) -> ToolCall:
    """A call as the library parsed it, or as far as it could."""
    call_id, raw = call.id or call_id, call.raw
    if not call.name:
        return read_call(raw, call_id)  # also a whole one whose end is missing
    cut = call.status in (ToolCallParseStatus.UNCLOSED_BLOCK, ToolCallParseStatus.MALFORMED_STRUCTURE)
    unread = call.status != ToolCallParseStatus.OK and call.arguments is None
    return call_of(call.name, raw if cut or unread else call.arguments, call_id, raw=raw)


def _only_thought(text: str, reasoning: str | None) -> bool:
    """Whether calls are part of thoughts that were never closed; the library takes the first for their end."""
    return reasoning is not None and "</think>" not in text and not split_thoughts(text, opened=True)[1]


@contextmanager
def _writing() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # boundary of the library, which says in many ways what a format doesn't have
        raise ChatFormatError(f"the chat format can't write this conversation: {error}") from error


def text_only(control_tokens: Iterable[str]) -> Callable[[Any], Any]:
    """A function that cuts (`CUT`) every spelling of a control token in the strings of a JSON value, keys included."""
    longest_first = sorted(filter(lambda token: len(token) > 1, control_tokens), key=len, reverse=True)
    if not longest_first:
        return lambda value: value
    # every place where one begins, those that overlap too
    begins = re.compile(f"(?=(?:{'|'.join(map(re.escape, longest_first))}))(.)", re.DOTALL)

    def cut(value: Any) -> Any:
        if isinstance(value, str):
            return begins.sub(rf"\1{CUT}", value)
        if isinstance(value, dict):
            return {cut(key): cut(item) for key, item in value.items()}
        return [cut(item) for item in value] if isinstance(value, list) else value

    return cut
