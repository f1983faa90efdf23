"""A small tokenizer learned from an environment's texts.

The chat format of a model family puts long fixed phrases around every message (how to call a tool, the tools' schemas).
A vocabulary of a few hundred tokens would spend most of a prompt on them, so each such phrase becomes a single token.
Everything else is byte-level BPE learned from demonstrations.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from forge_env.environment.base import resolve_task
from forge_env.environment.optional import demonstrate
from forge_env.redaction import redact
from forge_env.types import Message, Task, ToolSpec
from trainers.model.chat import CUT, TAG, Chat

CONTROL_TOKENS: tuple[str, ...] = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"),
    *("<tool_response>", "</tool_response>", "<think>", "</think>"),
)
SAMPLES = 2000
"""Number of demonstrations that a tokenizer is learned from."""
FORMATS = ("qwen3", "prime-qwen3", "nemotron-3", "nemotron-3-ultra", "nemotron-3.5")
"""Chat formats of the `renderers` library that need no other control tokens."""
# Newlines with their indentation, also in JSON's escaped form, so that code is split alike in a tool call and in an
# answer; words and numbers with their leading space; runs of punctuation.
_WORDS = r"\\n *|\n *|, | ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}\\]+|[ ]+|\s+"


class CharacterTokenizer:
    """Tokenizer of characters and control tokens, which renders conversations to text without a vocabulary."""

    name_or_path = "characters"
    unk_token_id: int | None = None
    eos_token_id: int | None = None
    control_tokens: tuple[str, ...] = ()
    """Empty, because text can't spell the negative ids of control tokens."""

    def encode(self, text: str, *args: Any, **kwargs: Any) -> list[int]:
        """Code points of `text`."""
        return [ord(character) for character in text]

    def decode(self, token_ids: Any, *args: Any, **kwargs: Any) -> str:
        """Text of code points and control tokens."""
        return "".join(CONTROL_TOKENS[-token - 1] if token < 0 else chr(token) for token in token_ids)

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        """Ids of control tokens, which are negative so that they differ from code points."""
        return -CONTROL_TOKENS.index(tokens) - 1 if tokens in CONTROL_TOKENS else None


def render_text(messages: list[Message], tools: list[ToolSpec], renderer: str) -> str:
    """Text of a conversation in the chat format."""
    characters = CharacterTokenizer()
    return characters.decode(Chat(characters, renderer).render_training(messages, tools)[0][0])


def fixed_phrases(demonstrations: list[list[Message]], tools: list[ToolSpec], renderer: str) -> list[str]:
    """Phrases in every conversation: the preamble, the roles, and the beginnings of answers and tool calls."""
    text = render_text(demonstrations[0], tools, renderer)
    preamble = text.partition("<|im_start|>")[2].partition("<|im_end|>")[0]
    phrases = {preamble, "user\n", "user", "assistant\n", "<think>\n\n</think>\n\n", '"}}\n'}
    for tool in tools:
        for argument in tool.parameters.get("properties", {}):
            phrases.add(f'\n{{"name": "{tool.name}", "arguments": {{"{argument}": "')
    answers = [messages[-1].content for messages in demonstrations]
    opening = _common_prefix(answers)
    closing = _common_prefix([answer[::-1] for answer in answers])[::-1]
    phrases |= {opening[: opening.rfind("\n") + 1], closing[max(closing.find("\n"), 0) :]} - {"", "\n"}
    # A tag such as "</answer>" would become a control token, and the preamble, which contains it, would not match.
    phrases = {phrase for phrase in phrases if not TAG.fullmatch(phrase)}
    return sorted(phrases, key=lambda phrase: (-len(phrase), phrase))


def train_tokenizer(texts: Iterable[str], phrases: list[str], vocab_size: int) -> Tokenizer:
    """Learn byte-level BPE of `vocab_size` tokens from `texts`; control tokens and `phrases` are single tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Replace(CUT, "")  # applied after phrases are matched, which can't span it
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(phrases),
        special_tokens=list(CONTROL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_without(texts, phrases), trainer)
    tokenizer.add_tokens([AddedToken(phrase, normalized=False) for phrase in phrases])
    return tokenizer


def _common_prefix(texts: list[str]) -> str:
    first, last = min(texts), max(texts)  # a prefix of these two is a prefix of all texts
    length = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
    return first[:length]


def _corpus(demonstrations: list[list[Message]]) -> Iterable[str]:
    """Texts that the vocabulary is learned from.

    Only the first line of a user's message is used: the rest is data, and data in single-character tokens can be copied
    character by character.
    """
    for messages in demonstrations:
        for message in messages:
            if message.role == "user":
                yield message.content.split("\n")[0] + "\n"
            elif message.role == "assistant":
                yield from (call.function.arguments for call in message.tool_calls)
                yield message.content


def _without(texts: Iterable[str], phrases: list[str]) -> Iterable[str]:
    for text in texts:
        for phrase in phrases:
            text = text.replace(phrase, "\0")
        yield from filter(None, text.split("\0"))


def training_task(environment: Any, index: int) -> Task:
    """The `index`-th training task; if there are fewer, they repeat."""
    task: Task = resolve_task(environment, None, {"split": environment.splits[0], "index": index})
    return task


def build_tokenizer(environment: Any, renderer: str, vocab_size: int, seed: int, samples: int = SAMPLES) -> Tokenizer:
    """Learn a tokenizer for `environment` from `samples` of its demonstrations on training tasks, or else its prompts.

    Secrets are redacted first, because the tokenizer is written to a file.
    """
    rng = random.Random(seed)
    tasks = (training_task(environment, index) for index in range(samples))
    demonstrations = [
        demonstrate(environment, task, rng) or [Message(role="user", content=task.prompt)] for task in tasks
    ]
    phrases = fixed_phrases(demonstrations, environment.tools, renderer)
    phrases = [phrase for phrase in phrases if redact(phrase) == phrase]
    return train_tokenizer(map(redact, _corpus(demonstrations)), phrases, vocab_size)


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write `tokenizer.json` into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
