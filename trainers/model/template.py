"""The chat format of a checkpoint folder's own template: tokens, exact continuation, masks, and reading of turns.

What a template does is found by rendering short conversations with it. What comes between two turns is what it writes
after a known assistant's text, so the sampled tokens stay as they are. A template that would write the tokens so far
differently (it drops former thoughts, or moves the tools to the last question) can't continue; the conversation is then
rendered anew, a fork.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_env.errors import UsageError
from forge_env.tools.chat_template import ERRORS, PROBE, ChatTemplate, settings_in
from forge_env.tools.turns import read_turn, split_thoughts
from forge_env.types import Message, ToolCall

if TYPE_CHECKING:
    from trainers.model.chat import FolderTokenizer

log = logging.getLogger(__name__)
NAME_IT = "name the chat format: model.renderer=chatml, qwen3, llama-3, or module:Class"
THOUGHT = "Zqxthought"
"""Thoughts in conversations that show how a template writes."""
OPENING = 8
"""Number of tokens at the end of a prompt that are searched for an opening thought tag."""
OPENS = ("<think>", "[THINK]", "<|channel>thought")
"""Endings of prompts that open thoughts."""
THINKS = ("</think>", "[/THINK]", "<channel|>", "<|channel|>analysis")
"""Markers of thoughts in a turn."""


class TemplateFormat:
    """A chat format that is defined by a template.

    `stop_token_ids` end a turn, besides those that the template writes; `thinking` needs a switch in the template.

    Raises:
        UsageError: the template can't write a question and an answer, or can't switch on thinking.
    """

    def __init__(
        self,
        tokenizer: FolderTokenizer,
        template: ChatTemplate,
        *,
        thinking: bool = False,
        stop_token_ids: Iterable[int] = (),
    ) -> None:
        self.tokenizer = tokenizer
        self.template = template
        self._options = {"enable_thinking": thinking, "thinking": thinking}
        self._logged: set[str] = set()
        self._check(thinking=thinking)
        ends = self._ends_of_turns()
        self.stop_token_ids = list(dict.fromkeys([*ends, *stop_token_ids]))
        texts = [tokenizer.decode([token]) for token in self.stop_token_ids]
        self._stops = [text for text in texts if text in tokenizer.control_tokens]
        if not ends:
            self._say(f"{template.source} writes no control token after a turn: every turn is rendered anew (a fork)")

    def render(self, messages: Sequence[dict[str, Any]], tools: Any, *, generation: bool) -> list[int]:
        """Token ids of a conversation, as `transformers` writes it."""
        return self.tokenizer.encode(self._text(messages, tools, generation=generation))

    def render_training(self, messages: Sequence[dict[str, Any]], tools: Any) -> list[tuple[list[int], list[bool]]]:
        """Sequences of a demonstration: token ids, [T], and a mask of those that the assistant is to produce, [T].

        A turn is to be produced from the end of the prompt before it to its stop token. A turn that the template writes
        differently once others follow it is in a sequence that ends with it (a fork), as it is in rollouts.
        """
        turns = [index for index, message in enumerate(messages) if message["role"] == "assistant" and index]
        sequences = []
        count = len(messages)
        while True:
            text = self._with_thoughts(messages[:count], tools)
            written = {index: self._span(text, messages[: index + 1], tools) for index in turns if index < count}
            spans = {index: span for index, span in written.items() if span is not None}
            ids, offsets = self.tokenizer.encode_with_offsets(text)
            mask = [any(start <= first and last <= end for start, end in spans.values()) for first, last in offsets]
            sequences.append((ids, mask))
            turns = [index for index in turns if index not in spans]
            if count - 1 in turns:
                self._say(
                    f"{self.template.source} writes a turn of a demonstration otherwise than its prompt begins it, so "
                    "the turn is not learned: see model.thinking"
                )
            count = max((index + 1 for index in turns if index < count - 1), default=0)
            if not count:
                return sequences
            self._say(f"{self.template.source} rewrites former turns: a demonstration is several sequences (forks)")

    def _span(self, text: str, messages: Sequence[dict[str, Any]], tools: Any) -> tuple[int, int] | None:
        """Start and end of the last of `messages` in a text that begins with them; None if it is written otherwise."""
        prompt, alone = self._text(messages[:-1], tools, generation=True), self._with_thoughts(messages, tools)
        start = len(prompt)
        if not (text.startswith(prompt) and alone.startswith(prompt)):
            return None
        end, alone_end = (self._end_of(whole, start, len(alone)) for whole in (text, alone))
        return (start, end) if text[start:end] == alone[start:alone_end] else None

    def _with_thoughts(self, messages: Sequence[dict[str, Any]], tools: Any) -> str:
        """Text of a conversation, with the thoughts that the model saw when it wrote the last turn.

        gpt-oss's template drops the thoughts before calls once an answer follows.
        """
        text = self._text(messages, tools)
        is_turn = messages[1:] and messages[-1]["role"] == "assistant"
        prompt = self._text(messages[:-1], tools, generation=True) if is_turn else ""
        if text.startswith(prompt):
            return text
        silent = [{key: value for key, value in each.items() if key != "reasoning_content"} for each in messages[:-1]]
        start = self._text(silent, tools, generation=True)
        return prompt + text.removeprefix(start) if text.startswith(start) else text

    def extend(
        self,
        prompt_ids: list[int],
        token_ids: list[int],
        history: Sequence[Message],
        observation: Sequence[dict[str, Any]],
        tools: Any,
    ) -> list[int] | None:
        """Build the next prompt as `Chat.extend` does; None if the template can't do so."""
        if not observation or not history or any(message["role"] == "assistant" for message in observation):
            return None
        for calls in (history[-1].tool_calls, history[-1].tool_calls[-1:]):  # some templates refuse several calls
            before, turn = _skeleton(history, observation, calls)
            with suppress(*ERRORS):
                start = self._text(before, tools, generation=True)
                text = self._text([*before, turn, *observation], tools, generation=True)
                break
        else:
            return None
        at = text.find(PROBE, len(start))
        end = min((end for stop in self._stops if (end := text.find(stop, at)) >= 0), default=-1)
        thinks = _thinks(self.tokenizer.decode(token_ids))
        if not text.startswith(start) or at < 0 or end < 0 or thinks != _thinks(text[len(start) : end]):
            self._say(
                f"{self.template.source} rewrites the conversation before a {observation[0]['role']} message: it is "
                "rendered anew there (a fork)"
            )
            return None
        tail = self.tokenizer.encode(text[end:])
        if token_ids and token_ids[-1] in self.stop_token_ids:
            if token_ids[-1] != tail[0]:
                return None  # the template ends former turns with another token
            tail = tail[1:]
        return [*prompt_ids, *token_ids, *tail]

    def read(self, text: str, *, tools: bool, native: bool, prompt_ids: list[int]) -> Message:
        """Parse the text of a turn, without its stop token.

        `tools` were offered in the template's way (`native`), or as text. The prompt may end with an opening thought
        tag.
        """
        opened = self.tokenizer.decode(prompt_ids[-OPENING:]).rstrip().endswith(OPENS)
        thoughts, rest = split_thoughts(text, opened=opened)
        reasoning = "\n".join(thoughts) if thoughts else None
        syntax = self.template.call_syntax if tools and native else None
        content, calls = syntax.read(rest) if syntax and syntax.read else (rest, [])
        return read_turn(content, reasoning=reasoning, calls=calls, tools=tools)

    def _text(self, messages: Sequence[dict[str, Any]], tools: Any, *, generation: bool = False) -> str:
        return self.template.render(messages, tools, generation=generation, **self._options)

    def _say(self, text: str) -> None:
        if text not in self._logged:
            self._logged.add(text)
            log.info("%s", text)

    def _check(self, *, thinking: bool) -> None:
        question, answer = {"role": "user", "content": PROBE}, {"role": "assistant", "content": THOUGHT}
        try:
            text = self._text([question, answer], None)
            prompt = self._text([question], None, generation=True)
        except ERRORS as error:
            raise UsageError(
                f"{self.template.source} can't write a question and an answer: {error}", fix=NAME_IT
            ) from error
        if PROBE not in prompt or THOUGHT not in text:
            raise UsageError(f"{self.template.source} leaves out the text of a question or an answer", fix=NAME_IT)
        self._options |= {"enable_thinking": False, "thinking": False}
        silent = self._text([question], None, generation=True)
        self._options |= {"enable_thinking": thinking, "thinking": thinking}
        if thinking and prompt == silent:
            raise UsageError(
                f"model.thinking: {self.template.source} has no switch for thinking", fix="use model.thinking=false"
            )

    def _ends_of_turns(self) -> list[int]:
        """Control tokens that the template writes after an answer and after calls; empty if there are none."""
        question, answer = {"role": "user", "content": "?"}, {"role": "assistant", "content": PROBE}
        ends = self.tokenizer.encode(self._text([question, answer], None).partition(PROBE)[2].lstrip())[:1]
        for calls in ([_call("f", "call_0"), _call("f", "call_1")], [_call("f", "call_0")]):  # some refuse two
            with suppress(*ERRORS):
                text = self._text([question, answer | {"content": "", "tool_calls": calls}], None)
                ids = self.tokenizer.encode(text.partition(PROBE)[2].rstrip())
                ends += [end for end in ids[-1:] if end not in ids[:-1]]  # what ends each call doesn't end the turn
                break
        return [token for token in ends if self.tokenizer.decode([token]) in self.tokenizer.control_tokens]

    def _end_of(self, text: str, start: int, default: int) -> int:
        """End of the assistant's turn that begins at `start`, after its stop token; `default` if it has none."""
        return min((at + len(stop) for stop in self._stops if (at := text.find(stop, start)) >= 0), default=default)


def _thinks(text: str) -> bool:
    return any(mark in text for mark in THINKS)


def _skeleton(
    history: Sequence[Message], observation: Sequence[dict[str, Any]], calls: Sequence[ToolCall]
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """A short conversation with what decides how a template continues this one: `(messages, last turn)`."""
    before: list[dict[str, Any]] = [{"role": "user", "content": "?"}]
    if history[0].role == "system":
        before.insert(0, {"role": "system", "content": "."})
    since = max((index for index, message in enumerate(history) if message.role == "user"), default=0)
    thinks = any(message.reasoning_content for message in history[since:-1])
    if thinks or (len(history) > 1 and history[-2].role == "tool"):
        call = {"role": "assistant", "content": "", "tool_calls": [_call("f", "call_0")]}
        before.append(call | ({"reasoning_content": "."} if thinks else {}))
        before.append({"role": "tool", "content": ".", "tool_call_id": "call_0", "name": "f"})
    turn: dict[str, Any] = {"role": "assistant", "content": PROBE}
    if history[-1].reasoning_content:
        turn["reasoning_content"] = THOUGHT
    if observation[0]["role"] == "tool":
        written = [_call(call.function.name or "f", call.id) for call in calls]
        turn |= {"content": "", "tool_calls": written or [_call("f", observation[0].get("tool_call_id") or "call_0")]}
    return before, turn


def _call(name: str, call_id: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": {"a": PROBE}}}


def folder_format(folder: Path, tokenizer: FolderTokenizer, *, thinking: bool) -> TemplateFormat | None:
    """The format of a checkpoint folder's own template; None if it has none."""
    template = ChatTemplate.of(folder)
    if template is None:
        return None
    return TemplateFormat(tokenizer, template, thinking=thinking, stop_token_ids=_ends(folder, tokenizer))


def chatml_format(folder: Path, tokenizer: FolderTokenizer, *, thinking: bool) -> TemplateFormat:
    """The built-in format `chatml`."""
    if absent := [token for token in ("<|im_start|>", "<|im_end|>") if tokenizer.convert_tokens_to_ids(token) is None]:
        raise UsageError(
            f"the tokenizer in {folder} can't write the chat format 'chatml': it has no {absent[0]}",
            fix="use model.renderer=auto, the model's own template",
        )
    return TemplateFormat(tokenizer, ChatTemplate.chatml(), thinking=thinking, stop_token_ids=_ends(folder, tokenizer))


def _ends(folder: Path, tokenizer: FolderTokenizer) -> list[int]:
    """Tokens that end a turn according to a folder's configuration."""
    tokens: list[int] = []
    for name in ("generation_config.json", "config.json"):
        value = settings_in(folder / name).get("eos_token_id")
        tokens += [value] if isinstance(value, int) else value if isinstance(value, list) else []
    return [token for token in tokens if isinstance(token, int) and 0 <= token < tokenizer.vocab_size]
