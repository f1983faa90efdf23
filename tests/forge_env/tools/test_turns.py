"""One reading of a model's turn, whatever it wrote."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forge_env.tools.json_text import MAX_DEPTH, BadJSONError, arguments_text, read_json
from forge_env.tools.turns import call_of, explain, is_malformed, read_turn
from forge_env.types import Message

F = '<tool_call>\n{"name": "f", "arguments": {"n": 1}}\n</tool_call>'


def read(text: str, **options: Any) -> tuple[str | None, str, list[tuple[str, str]]]:
    message = read_turn(text, **{"tools": True, **options})
    calls = [(call.function.name, call.function.arguments) for call in message.tool_calls]
    return message.reasoning_content, message.content, calls


CALLED = [("f", '{"n": 1}')]
TURNS: dict[str, tuple[str, str | None, str, list[tuple[str, str]]]] = {
    "an answer": ("42 \n", None, "42 \n", []),
    "thoughts": ("<think>\nhm\n</think>\n\n42\n", "hm", "42", []),
    "Kimi's spelling": ("\u25c1think\u25b7hm\u25c1/think\u25b742", "hm", "42", []),
    "Cohere's spelling": ("<|START_THINKING|>hm<|END_THINKING|>42", "hm", "42", []),
    "another spelling": ("\n<Thinking>hm</Thinking>42", "hm", "42", []),
    "Mistral's spelling": ("[THINK]hm[/THINK]42", "hm", "42", []),
    "thoughts that the prompt opened": ("hm\n</think>\n\n42", "hm", "42", []),
    "thoughts that are never closed": ("<think>hm", "hm", "", []),
    "empty thoughts": ("<think>\n\n</think>\n\n42", None, "42", []),
    "two blocks": ("<think>a</think>\n<think>b</think>42", "a\nb", "42", []),
    "a tag in the thoughts": ("<think>a <think> b</think>42", "a  b", "42", []),
    "a tag in the answer": ("Write <think>hm</think> first.", None, "Write <think>hm</think> first.", []),
    "a closing tag in the answer": ("<think>a</think>b</think>c", "a", "b</think>c", []),
    "two closing tags": ("hm</think>\n</think>42", "hm", "42", []),
    "Gemini's and Seed's spelling": ("<thought>a</thought><seed:think>b</seed:think>42", "a\nb", "42", []),
    "thoughts in thoughts": ("<think>a <think>b</think> c</think>42", "a b</think> c", "42", []),
    "Gemma 4's spelling": ("<|channel>thought\nhm\n<channel|>42", "hm", "42", []),
    "gpt-oss's channels": (
        "<|channel|>analysis<|message|>hm</think><|end|><|start|>assistant<|channel|>final<|message|>42",
        "hm</think>",
        "42",
        [],
    ),
    "a channel without thoughts": ("<|channel|>final<|message|>42<|return|>", None, "42", []),
    "a channel of another role": (
        "<|channel|>final<|message|>42<|end|><|start|>user<|message|>and?<|end|>"
        "<|start|>assistant<|channel|>final<|message|>43",
        None,
        "42",
        [],
    ),
    "a channel that is cut off": ("<|channel|>analysis<|message|>hm", "hm", "", []),
    "a call whose JSON has the closing tag": (
        '<tool_call>{"name": "f", "arguments": {"n": "</tool_call>"}}</tool_call>',
        None,
        "",
        [("f", '{"n": "</tool_call>"}')],
    ),
    "prose about calls": ("Use `<tool_call>` and `</tool_call>`.", None, "Use `<tool_call>` and `</tool_call>`.", []),
    "prose about calls, then a call": (f"Use `<tool_call>`: {F}", None, "Use `<tool_call>`:", CALLED),
    "a call": (f"So: {F} and then", None, "So:", CALLED),
    "two calls": (F + F, None, "", CALLED * 2),
    "a call without its end": (F.removesuffix("</tool_call>"), None, "", CALLED),
    "a call that isn't closed before the next": (F.removesuffix("\n</tool_call>") + F, None, "", CALLED * 2),
    "a call in OpenAI's format": (
        '<tool_call>{"type": "function", "function": {"name": " f", "parameters": {"n": 1}}}</tool_call>',
        None,
        "",
        CALLED,
    ),
    "a call after thoughts": (f"<think>hm</think>{F}", "hm", "", CALLED),
    "a call that is only thought of": (f"<think>or {F}?</think>42", f"or {F}?", "42", []),
    "a call in thoughts without end": (f"<think>or {F}, no", f"or {F}, no", "", []),
    "a call that ends the thoughts": (f"<think>hm {F}", "hm", "", CALLED),
    "words about calls in thoughts": ("<think>no <tool_call> here", "no <tool_call> here", "", []),
}


@pytest.mark.parametrize("name", TURNS)
def test_turns(name: str) -> None:
    text, *expected = TURNS[name]
    assert read(text) == tuple(expected)


def test_a_long_channel_header_is_split_fast() -> None:
    text = "<|channel|>analysis" + "x" * 300_000
    assert read(text) == (None, text, [])


def test_without_tools_a_call_is_text() -> None:
    assert read(f"Write {F}", tools=False) == (None, f"Write {F}", [])


def test_what_a_server_has_parsed_is_kept() -> None:
    call = call_of("f", {"n": 1}, "c")
    assert read("\n\n42", reasoning="hm\n") == ("hm", "42", [])
    assert read("a </think> b", reasoning="hm") == ("hm", "a </think> b", [])
    assert read("\n</think>\n\nb", reasoning="hm") == ("hm", "b", [])
    assert read(f"{F}", calls=[call]) == (None, F, CALLED), "it has found the calls already"


@pytest.mark.parametrize("more", ['"args": {"n": 1}', '"input": {"n": 1}', '"n": 1'])
def test_a_call_whose_arguments_have_another_name_is_malformed(more: str) -> None:
    [call] = read_turn(f'<tool_call>{{"name": "f", {more}}}</tool_call>', tools=True).tool_calls
    assert is_malformed(call)
    assert explain(call.function.arguments) == 'its "arguments" are missing'
    [call] = read_turn('<tool_call>{"name": "f"}</tool_call>', tools=True).tool_calls
    assert call.function.arguments == "{}"


@pytest.mark.parametrize(
    ("written", "read_as"),
    [
        ("", "{}"),
        (" \n", "{}"),
        (None, "{}"),
        ("null", "{}"),
        ('"{}"', "{}"),
        ('""', "{}"),
        ({"é": 1}, '{"é": 1}'),
        ('{"a":1}', '{"a":1}'),
        (json.dumps(json.dumps('{"a": 1}')), '{"a": 1}'),
        ("[1]", "[1]"),
        ([1], "[1]"),
        ("{bad", "{bad"),
        ('"{bad"', "{bad"),
        (r'{"s": "\ud800"}', '{"s": "\ufffd"}'),
        ({"s": "\ud800"}, '{"s": "\ufffd"}'),
        (r'{"s": "\ud83d\ude00"}', '{"s": "\U0001f600"}'),
    ],
)
def test_arguments(written: Any, read_as: str) -> None:
    assert arguments_text(written) == read_as


@pytest.mark.parametrize(
    ("block", "mistake"),
    [
        ('{"name": "f",}', "not valid JSON: .* at line 1, column 14, at '}'"),
        ('{"name": "f", "arguments": {"a": 1', "not valid JSON: it ends too early, at line 1, column 35"),
        ("{'name': 'f'}", "not valid JSON: .* at line 1, column 2"),
        ("", "ends too early"),
        ("[" * 3000, f"more than {MAX_DEPTH} levels"),
        ('{"a": ' * (MAX_DEPTH + 1) + "1" + "}" * (MAX_DEPTH + 1), f"more than {MAX_DEPTH} levels"),
        ('{"name": "f", "arguments": {"n": ' + "7" * 5000 + "}}", "more than 4,300 digits"),
        ('["f"]', "must be a JSON object, not a list"),
        ('{"arguments": {}}', '"name" is missing'),
        ('{"name": 5}', '"name" must be the name of a tool, not 5'),
        ('{"name": null}', "not null"),
        ('{"name": ["f"]}', "not a list"),
        ('{"name": " "}', "not an empty string"),
    ],
)
def test_a_malformed_call_says_what_is_wrong_with_it(block: str, mistake: str) -> None:
    [call] = read_turn(f"<tool_call>{block}</tool_call>", tools=True).tool_calls
    assert is_malformed(call)
    assert call.function.arguments == block.strip()
    with pytest.raises(AssertionError, match=mistake):
        raise AssertionError(explain(block))


def test_as_deep_as_is_allowed_is_read_whatever_the_stack() -> None:
    deep = "[" * MAX_DEPTH + "]" * MAX_DEPTH
    assert json.dumps(read_json(deep)) == deep
    with pytest.raises(BadJSONError):
        read_json(f"[{deep}]")


@pytest.mark.parametrize(
    ("text", "mistake"), [('{"n": NaN}', "NaN is not"), ("[-Infinity]", "-Inf"), ("1e999", "large")]
)
def test_numbers_of_json_are_finite(text: str, mistake: str) -> None:
    with pytest.raises(BadJSONError, match=mistake):
        read_json(text)
    [call] = read_turn(f'<tool_call>{{"name": "f", "arguments": {text}}}</tool_call>', tools=True).tool_calls
    assert call.function.name == "f"  # as vLLM's parser; the tool says what is wrong


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inside: st.lists(inside, max_size=3) | st.dictionaries(st.text(max_size=3), inside, max_size=3),
    max_leaves=6,
)
arguments = st.one_of(
    json_values.map(json.dumps),
    json_values.map(json.dumps).map(json.dumps),
    st.sampled_from(["", " ", "null", "[]", '"x"', "{", '{"a": "\\ud800"}', '{"n": ' + "9" * 5000 + "}", "[" * 2000]),
)
nearly = st.builds(
    lambda name, text, cut, key: f'{{"name": {name}, "{key}": {text}}}'[: cut or None],
    st.sampled_from(['"f"', "5", "null", '["f"]', "{}", "true", "1.5", '""', '"\\ud800"', "f"]),
    arguments,
    st.integers(-3, 0),
    st.sampled_from(["arguments", "parameters", "arguments "]),
)
pieces = st.one_of(
    st.sampled_from(["<think>", "</think>", "<tool_call>", "</tool_call>", "[THINK]", "\n", " ", "42", "\ud800"]),
    st.text(max_size=6),
    nearly,
    nearly.map(lambda block: f"<tool_call>{block}</tool_call>"),
)
turns = st.lists(pieces, max_size=8).map("".join)


@settings(max_examples=300, deadline=None)
@given(text=turns, reasoning=st.none() | st.text(max_size=5), tools=st.booleans())
def test_any_text_is_a_turn(text: str, reasoning: str | None, tools: bool) -> None:
    message = read_turn(text, reasoning=reasoning, tools=tools)
    assert Message.model_validate(message.model_dump()) == message
    message.model_dump_json().encode()  # no half of a pair is left
    for call in message.tool_calls:
        assert not is_malformed(call) or explain(call.function.arguments)
    written = len(message.content) + len(message.reasoning_content or "")
    written += sum(len(call.function.arguments) for call in message.tool_calls)
    assert written <= 6 * len(text) + len(reasoning or "") + 20 * len(message.tool_calls)


@pytest.mark.timeout(60)  # in quadratic time they take minutes
@pytest.mark.parametrize(
    "text", ["<tool_call>" * 20_000, "<think>" * 20_000, "</think>" * 20_000, "<think></think>" * 10_000, "[" * 200_000]
)
def test_long_turns_are_read_in_linear_time(text: str) -> None:
    read_turn(text, tools=True)
    read_turn(f"<tool_call>{text}</tool_call>", tools=True)
