"""The chat template in a small model's folder: other servers of the folder must see the tokens it was trained on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("renderers")

from hypothesis import given, settings
from hypothesis import strategies as st

import forge_env as fe
from forge_env.config.recipe import ModelSection
from forge_env.endpoint.history import wire
from forge_env.environment.base import Environment
from forge_env.types import FunctionCall, Message, ToolCall, ToolSpec
from trainers.model.chat import Chat, FolderTokenizer
from trainers.model.tiny import build_tiny_folder, chat_template
from trainers.model.tokenizer import CONTROL_TOKENS

pytestmark = pytest.mark.stack


class Server:
    """What a server of the folder does with a request: the template makes text of it, the tokenizer tokens."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(folder)

    def render(self, messages: list[Message], tools: list[ToolSpec], *, generation: bool, **options: Any) -> list[int]:
        dictionaries: list[dict[str, Any]] = []
        for message in messages:
            data = wire(message)  # what goes over the wire, plus what endpoints refuse to take
            if message.reasoning_content is not None:
                data["reasoning_content"] = message.reasoning_content
            dictionaries.append(data)
        specs = [tool.to_openai() for tool in tools] or None
        text = self.tokenizer.apply_chat_template(
            dictionaries, tools=specs, add_generation_prompt=generation, tokenize=False, **options
        )
        ids: list[int] = self.tokenizer(text, add_special_tokens=False).input_ids
        return ids


@pytest.fixture(scope="module")
def environment() -> Environment:
    return fe.make("coding_rlvr", levels=[1, 2])


@pytest.fixture(scope="module")
def folder(environment: Environment, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_folder(ModelSection(), environment, 0, tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def chats(folder: Path) -> list[Chat]:
    return [Chat(FolderTokenizer(folder), thinking=thinking) for thinking in (False, True)]


@pytest.fixture(scope="module")
def server(folder: Path) -> Server:
    return Server(folder)


words = st.text(
    st.one_of(
        st.sampled_from(list(' \n\t\\"{}<>/|`:,ABCdefuser019')),
        st.characters(exclude_categories=["Cs"], exclude_characters="\ufdd0"),
    ),
    max_size=24,
)
phrases = st.sampled_from(
    [
        "",
        "user",
        "user\n",
        "assistant\n",
        "\n",
        "Done",
        "```python\n",
        '"}}\n',
        *CONTROL_TOKENS,
    ]
)
texts = st.lists(st.one_of(words, phrases), max_size=4).map("".join)
arguments = st.one_of(st.dictionaries(words, st.one_of(words, st.integers(), st.none())).map(json.dumps), st.just("{}"))
calls = st.builds(
    lambda name, text: ToolCall(id="call_0", function=FunctionCall(name=name, arguments=text)),
    st.sampled_from(["python", "sql", "f"]),
    arguments,
)
assistants = st.builds(
    lambda content, tool_calls, reasoning: Message(
        role="assistant", content=content, tool_calls=tool_calls, reasoning_content=reasoning
    ),
    texts,
    st.lists(calls, max_size=3),
    st.one_of(st.none(), texts),
)
others = st.builds(
    lambda role, content: Message(role=role, content=content, tool_call_id="call_0" if role == "tool" else None),
    st.sampled_from(["user", "tool", "tool", "system"]),
    texts,
)
conversations = st.lists(st.one_of(assistants, others), min_size=1, max_size=8)
OTHER_TOOLS = [
    ToolSpec(name="sql", description='Ask "shop".\nÉté <&>', parameters={"type": "object", "properties": {}}),
    ToolSpec(name="f", description="Ends with <|im_end|>, after </tool_call>"),
]


@settings(max_examples=400, deadline=None)
@given(
    messages=conversations,
    which=st.sampled_from(["none", "own", "others"]),
    generation=st.booleans(),
    thinking=st.booleans(),
)
def test_any_conversation_has_the_same_tokens(
    chats: list[Chat],
    server: Server,
    environment: Environment,
    messages: list[Message],
    which: str,
    generation: bool,
    thinking: bool,
) -> None:
    tools = {"none": [], "own": environment.tools, "others": OTHER_TOOLS}[which]
    theirs = server.render(messages, tools, generation=generation, enable_thinking=thinking)
    assert chats[thinking].render(messages, tools, generation=generation) == theirs


def test_the_folder_says_whether_its_model_thinks() -> None:
    assert "is defined else false" in chat_template(thinking=False)
    assert "is defined else true" in chat_template(thinking=True)
