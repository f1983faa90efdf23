"""Between messages and tokens: the tokenizer of a checkpoint folder and the chat format of its model family.

Rendering and parsing are the `renderers` library's; this module adapts its types to ours and holds the one
rule that makes trajectories exact: a turn's prompt continues the tokens of the turn before it (bridge), and
only when the format can't prove that is the conversation rendered anew (a fork, which is counted).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from renderers import ToolCallParseStatus, create_renderer
from renderers.configs import Qwen3RendererConfig, config_from_name
from tokenizers import Tokenizer

from forge_env.errors import UsageError
from forge_env.types import FunctionCall, Message, ToolCall, ToolSpec


class FolderTokenizer:
    """The `tokenizer.json` of a checkpoint folder behind the small surface that `renderers` needs."""

    def __init__(self, folder: str | Path) -> None:
        path = Path(folder) / "tokenizer.json"
        if not path.is_file():
            raise UsageError(
                f"no tokenizer.json in {folder}", fix="model.path must be a Hugging Face checkpoint folder"
            )
        self._tokenizer = Tokenizer.from_file(str(path))
        self.name_or_path = str(folder)
        self.unk_token_id: int | None = None
        self.eos_token_id: int | None = self._tokenizer.token_to_id("<|im_end|>")

    @property
    def vocab_size(self) -> int:
        """Tokens in the vocabulary, added ones included."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str, *args: Any, **kwargs: Any) -> list[int]:
        """Token ids of `text`; special tokens written out in it are recognised, none are added."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

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


class Chat:
    """Renders conversations to token ids and parses sampled tokens back into a message."""

    def __init__(self, tokenizer: Any, renderer: str = "qwen3") -> None:
        self.tokenizer = tokenizer
        # With thinking off, every turn's tokens survive in the next turn's prompt, so episodes don't fork.
        config = Qwen3RendererConfig(enable_thinking=False) if renderer == "qwen3" else config_from_name(renderer)
        self._renderer = create_renderer(tokenizer, config)
        question = [{"role": "user", "content": "?"}]
        plain = self._renderer.render_ids(question)
        self._generation_prompt = list(self._renderer.render_ids(question, add_generation_prompt=True))[len(plain) :]

    @property
    def stop_token_ids(self) -> list[int]:
        """Tokens that end an assistant turn."""
        return [token for token in self._renderer.get_stop_token_ids() if token is not None]

    def render(self, messages: list[Message], tools: list[ToolSpec], *, generation: bool = True) -> list[int]:
        """Token ids of a conversation; with `generation`, up to where the assistant begins to write."""
        return list(
            self._renderer.render_ids(
                [_to_renderer(message) for message in messages],
                tools=_tools(tools),
                add_generation_prompt=generation,
            )
        )

    def render_training(self, messages: list[Message], tools: list[ToolSpec]) -> tuple[list[int], list[bool]]:
        """A demonstration's token ids, [T], and which of them the assistant is to produce, [T].

        What the generation prompt already holds (the role, an empty thinking block) is not to be produced.
        """
        rendered = self._renderer.render([_to_renderer(message) for message in messages], tools=_tools(tools))
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
        bridged = self._renderer.bridge_to_next_turn(
            prompt_ids, token_ids, [_to_renderer(message) for message in observation], tools=_tools(tools)
        )
        return None if bridged is None else list(bridged.token_ids)

    def parse(self, token_ids: list[int], tools: list[ToolSpec], prompt_ids: list[int]) -> Message:
        """The assistant message that `token_ids` spell.

        A tool call that does not parse is kept as a call of the name it has (or "invalid") with its raw text as
        arguments, so that the environment answers it with an error the model can act on.
        """
        parsed = self._renderer.parse_response(token_ids, tools=_tools(tools), prompt_ids=prompt_ids)
        calls = []
        for index, call in enumerate(parsed.tool_calls):
            ok = call.status == ToolCallParseStatus.OK
            arguments = call.arguments if isinstance(call.arguments, str) else json.dumps(call.arguments)
            calls.append(
                ToolCall(
                    id=call.id or f"call_{index}",
                    function=FunctionCall(name=call.name or "invalid", arguments=arguments if ok else call.raw),
                )
            )
        return Message(
            role="assistant",
            content=parsed.content,
            tool_calls=calls,
            reasoning_content=parsed.reasoning_content or None,
        )


def _to_renderer(message: Message) -> Any:
    return message.to_openai()


def _tools(tools: list[ToolSpec]) -> Any:
    return [tool.to_openai() for tool in tools] or None
