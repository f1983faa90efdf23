"""The same turns through training, `vllm:CHECKPOINT`, endpoints and the gateway: one reading."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from pathlib import Path
from typing import Any

import httpx2
import pytest

pytest.importorskip("renderers")

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forge_env.config.evaluation import EndpointOptions
from forge_env.config.finding import bundled_models
from forge_env.endpoint.chat_format import TokenReader
from forge_env.endpoint.policy import EndpointPolicy
from forge_env.gateway.request import ModelRequest
from forge_env.gateway.server import Gateway
from forge_env.tools.turns import is_malformed
from forge_env.types import Message, ToolSpec
from tests.forge_env.endpoint.server import completion
from tests.forge_env.tools.test_turns import TURNS, nearly
from tests.trainers.model.families import family_folder
from trainers.model.chat import Chat, FolderTokenizer, token_reader

pytestmark = pytest.mark.stack
TOOLS = [ToolSpec(name="f", parameters={"type": "object", "properties": {"n": {"type": "integer"}}})]
QUESTION = [Message(role="user", content="?")]
COUNT = 200
Reading = tuple[str, str | None, list[tuple[str, str]]]


def reading(message: Message) -> Reading:
    calls = [(call.function.name, call.function.arguments) for call in message.tool_calls]
    return message.content, message.reasoning_content, calls


@pytest.fixture(scope="module")
def chat() -> Chat:
    return Chat(FolderTokenizer(bundled_models()["coding_rlvr_base"]))


def some_turns() -> list[str]:
    """200 turns: every way to think, to answer and to call, some of it wrong."""
    thoughts = [
        "",
        "<think>\nhm\n</think>\n\n",
        "<think>or {call}? no</think>\n",
        "<think>\n\n</think>\n\n",
        "<think>hm ",
    ]
    answers = ["", "42", "The answer is 42.\n", "a < b", "```python\nx = {'a': 1}\n```"]
    blocks = [
        '{"name": "f", "arguments": {"n": 1}}',
        '{"name": "f", "arguments": {"n": 1}',
        '{"name": "f"}',
        '{"name": "f", "arguments": ""}',
        '{"name": "f", "arguments": null}',
        '{"name": "f", "arguments": [1]}',
        '{"name": "f", "arguments": "{\\"n\\": 1}"}',
        '{"name": "f", "arguments": "no json"}',
        '{"name": "g", "arguments": {"s": "é \\ud800"}}',
        '{"name": 5, "arguments": {}}',
        '{"arguments": {"n": 1}}',
        "[1]",
        "f(1)",
        '{"name": "f", "arguments": {"n": ' + "7" * 5000 + "}}",
        '{"name": "f", "arguments": ' + '{"a": ' * 1200 + "1" + "}" * 1201,
    ]
    calls = [f"<tool_call>\n{block}\n</tool_call>" for block in blocks]
    calls += [calls[0] * 2, f"{calls[0]}\n{calls[1]}", calls[0].removesuffix("</tool_call>"), f"{calls[0]} and then"]
    every = itertools.product(thoughts, answers, ["", *calls])
    written = sorted({"".join(parts).replace("{call}", calls[0]) for parts in every})
    turns = [*(text for text, *_ in TURNS.values()), *random.Random(0).sample(written, COUNT)]
    return [text for text in turns if "Thinking" not in text and "[THINK]" not in text][:COUNT]


def served(text: str, chat: Chat, prompt: list[int]) -> dict[str, Any]:
    """What vLLM's server answers that was started without parsers, with the tokens of the turn."""
    ids = chat.tokenizer.encode(f"{text}<|im_end|>")
    answer = completion(text)
    answer["prompt_token_ids"] = prompt
    answer["choices"][0] |= {"token_ids": ids, "logprobs": {"content": [{"logprob": -0.5}] * len(ids)}}
    return answer


def sampled(chat: Chat, text: str, prompt: list[int]) -> Message:
    return chat.parse(chat.tokenizer.encode(f"{text}<|im_end|>"), TOOLS, prompt)


def question(chat: Chat) -> list[int]:
    """A prompt that leaves it to the model whether to think."""
    return chat.render(QUESTION, TOOLS)


async def replies(answers: list[dict[str, Any]], reader: TokenReader | None = None, **options: Any) -> list[Message]:
    left = iter(answers)

    async def exchange(*_: Any, **__: Any) -> dict[str, Any]:
        return next(left)

    async with EndpointPolicy(EndpointOptions(model="m", retries=0, **options)) as policy:
        policy.reader = reader
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(policy._connections, "exchange", exchange)  # 200 turns are many for a server in a test
            return [(await policy.session(TOOLS).reply(QUESTION)).message for _ in answers]


async def through_the_gateway(messages: list[Message]) -> list[Message]:
    """As a program reads them that asks for chat completions."""
    left = iter(messages)

    async def answer(request: ModelRequest) -> Message:
        return next(left)

    read: list[Message] = []
    async with Gateway() as gateway, httpx2.AsyncClient() as client:
        with gateway.open(answer) as access:
            for _ in messages:
                body = {"messages": [{"role": "user", "content": "?"}]}
                key = {"Authorization": f"Bearer {access.key}"}
                data = (await client.post(f"{access.openai_url}/chat/completions", json=body, headers=key)).json()
                said = data["choices"][0]["message"]
                del said["refusal"]
                read.append(Message.from_openai({**said, "content": said["content"] or ""}))
    return read


async def test_one_turn_has_one_reading(chat: Chat) -> None:
    turns, prompt = some_turns(), question(chat)
    assert len(turns) == COUNT
    trained = [sampled(chat, text, prompt) for text in turns]
    expected = list(map(reading, trained))
    malformed = sum(is_malformed(call) for message in trained for call in message.tool_calls)
    assert malformed > 30
    assert sum(bool(message.tool_calls) for message in trained) > 80
    assert sum(message.reasoning_content is not None for message in trained) > 80

    plain = [completion(text) for text in turns]
    tokens = [served(text, chat, prompt) for text in turns]
    read = token_reader(bundled_models()["coding_rlvr_base"], "qwen3")
    assert read is not None
    ways = {
        "endpoint": await replies(plain),
        "text tools": await replies(plain, tools="text"),
        "vllm:": await replies(tokens, read),
    }
    ways["gateway"] = await through_the_gateway(ways["endpoint"])
    for way, messages in ways.items():
        different = [
            (text, want, got)
            for text, want, got in zip(turns, expected, map(reading, messages), strict=True)
            if want != got
        ]
        assert different == [], f"{way}: {len(different)} of {COUNT} turns are read otherwise"


@pytest.mark.slow
async def test_what_vllms_own_parsers_make_of_a_turn_does_not_matter(chat: Chat) -> None:
    """They execute calls that are only thought of, and drop what is around a call that they can't read."""
    transformers = pytest.importorskip("transformers")
    manager = pytest.importorskip("vllm.parser.parser_manager").ParserManager
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    folder = bundled_models()["coding_rlvr_base"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    parsers = manager.get_parser(tool_parser_name="hermes", reasoning_parser_name="qwen3", enable_auto_tools=True)
    request = ChatCompletionRequest(
        model="m", messages=[{"role": "user", "content": "?"}], tools=[tool.to_openai() for tool in TOOLS]
    )
    turns, prompt, answers = some_turns()[::3], question(chat), []
    for text in turns:
        parser = parsers(tokenizer, request.tools, chat_template_kwargs={"enable_thinking": False})
        reasoning, content, calls = await asyncio.to_thread(parser.parse, text, request, enable_auto_tools=True)
        answer = served(text, chat, prompt)
        named = [{"id": call.id, "function": call.model_dump(include={"name", "arguments"})} for call in calls or ()]
        message = {"role": "assistant", "content": content, "reasoning": reasoning, "tool_calls": named}
        answer["choices"][0]["message"] = message
        answers.append(answer)
    messages = await replies(answers, token_reader(Path(folder), "qwen3"))
    expected = [reading(sampled(chat, text, prompt)) for text in turns]
    assert [reading(message) for message in messages] == expected


async def test_a_server_ends_turns_where_the_trainer_does(tmp_path: Path) -> None:
    """A base model's folder names another end of text than the chat template writes."""
    folder = family_folder(tmp_path, "smollm2")
    tokenizer = FolderTokenizer(folder)
    ends = [tokenizer.convert_tokens_to_ids(token) for token in ("<|im_end|>", "<|endoftext|>")]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends[1]}))
    async with EndpointPolicy(EndpointOptions(model="m")) as policy:
        assert "stop_token_ids" not in policy.request([], None)
        policy.reader = token_reader(folder, "auto")
        assert policy.request([], None)["stop_token_ids"] == ends


# --- every format that the bundled tokenizer can write


@pytest.fixture(scope="module")
def chats() -> dict[str, Chat]:
    tokenizer = FolderTokenizer(bundled_models()["coding_rlvr_base"])
    return {name: Chat(tokenizer, name) for name in ("qwen3", "prime-qwen3", "nemotron-3")}


xml = st.builds(
    lambda name, key, value, end: f"<function={name}>\n<parameter={key}>\n{value}\n</parameter>\n</function>"[:end],
    st.sampled_from(["f", "5", "", "f>", "<f"]),
    st.sampled_from(["n", "", "n=1", "m"]),
    st.sampled_from(["1", "7" * 5000, "[" * 2000, "{", "", "\\ud800", "<parameter=n>"]),
    st.sampled_from([None, -1, -12, -25, 12]),
)
marks = st.sampled_from(["<think>", "</think>", "<tool_call>", "</tool_call>", "\n", "42"])
blocks = st.one_of(nearly, xml).map(lambda block: f"<tool_call>\n{block}\n</tool_call>")
turns_of_any_format = st.lists(st.one_of(marks, nearly, xml, blocks, st.text(max_size=4)), max_size=5).map("".join)


@pytest.mark.parametrize("name", ["qwen3", "prime-qwen3", "nemotron-3"])
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(text=turns_of_any_format, tools=st.booleans())
def test_nearly_right_calls_of_every_format_are_read(chats: dict[str, Chat], name: str, text: str, tools: bool) -> None:
    chat, offered = chats[name], TOOLS if tools else []
    ids = chat.tokenizer.encode(text.encode("utf-8", "replace").decode())
    message = chat.parse(ids, offered, chat.render(QUESTION, offered))
    assert Message.model_validate(message.model_dump()) == message
    message.model_dump_json().encode()
    assert tools or not message.tool_calls
