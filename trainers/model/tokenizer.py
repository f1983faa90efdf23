"""A small tokenizer made from an environment's own text.

The chat format of a model family puts long fixed phrases around every message (how to call a tool, the tools'
schemas). A vocabulary of a few hundred tokens would spend most of a prompt on them, so each such phrase becomes
one token of its own; everything else is byte-level BPE learned from demonstrations.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from forge_env.types import Message, ToolSpec
from trainers.model.chat import Chat

CONTROL_TOKENS: tuple[str, ...] = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"),
    *("<tool_response>", "</tool_response>", "<think>", "</think>"),
)
# Words with their leading space, single digits, runs of spaces, punctuation, and the escapes of JSON strings.
_WORDS = r'\\n|\\"| ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}\\]+|\n|[ ]+(?=[ ])|[ ]+|\s+|\\'


class CharacterTokenizer:
    """One token per character, control tokens whole: renders a conversation to text without any vocabulary."""

    name_or_path = "characters"
    unk_token_id: int | None = None
    eos_token_id: int | None = None

    def encode(self, text: str, *args: Any, **kwargs: Any) -> list[int]:
        """Code points of `text`."""
        return [ord(character) for character in text]

    def decode(self, token_ids: Any, *args: Any, **kwargs: Any) -> str:
        """Text of code points and control tokens."""
        return "".join(CONTROL_TOKENS[-token - 1] if token < 0 else chr(token) for token in token_ids)

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        """Control tokens have negative ids, out of the code points' way."""
        return -CONTROL_TOKENS.index(tokens) - 1 if tokens in CONTROL_TOKENS else None


def render_texts(demonstrations: Iterable[list[Message]], tools: list[ToolSpec], renderer: str) -> list[str]:
    """The demonstrations as the text that the chat format makes of them."""
    characters = CharacterTokenizer()
    chat = Chat(characters, renderer)
    return [characters.decode(chat.render_training(messages, tools)[0]) for messages in demonstrations]


def fixed_phrases(texts: list[str], tools: list[ToolSpec]) -> list[str]:
    """Phrases of the chat format that stand in every text: the preamble, the roles, the opening of a tool call."""
    preamble = _common_prefix(texts)
    phrases = {part for part in _split_control(preamble) if len(part) > 12}
    phrases |= {"system\n", "user\n", "user", "assistant\n"}
    for tool in tools:
        for argument in tool.parameters.get("properties", {}):
            phrases.add(f'\n{{"name": "{tool.name}", "arguments": {{"{argument}": "')
    phrases.add('"}}\n')
    return sorted(phrases, key=lambda phrase: (-len(phrase), phrase))


def train_tokenizer(texts: list[str], phrases: list[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE of `vocab_size` tokens over `texts`, with control tokens and `phrases` as tokens of their own."""
    tokenizer = Tokenizer(models.BPE())
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
    first, last = min(texts), max(texts)  # whatever these two share, all between them share
    length = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
    return first[:length]


def _split_control(text: str) -> list[str]:
    for token in CONTROL_TOKENS:
        text = text.replace(token, "\0")
    return text.split("\0")


def _without(texts: list[str], phrases: list[str]) -> Iterable[str]:
    for text in texts:
        for phrase in phrases:
            text = text.replace(phrase, "\n")
        yield "\n".join(_split_control(text))


def build_tokenizer(environment: Any, renderer: str, vocab_size: int, seed: int, samples: int = 2000) -> Tokenizer:
    """A tokenizer for `environment`, learned from `samples` of its demonstrations on training tasks."""
    rng = random.Random(seed)
    demonstrations = [environment.demonstrate(environment.task("train", index), rng) for index in range(samples)]
    texts = render_texts(demonstrations, environment.tools, renderer)
    return train_tokenizer(texts, fixed_phrases(texts, environment.tools), vocab_size)


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write `tokenizer.json` into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
