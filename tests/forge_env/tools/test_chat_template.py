"""Templates come from strangers: they can't take unlimited time or memory, or leave the sandbox."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from jinja2 import TemplateError

from forge_env.errors import UsageError
from forge_env.tools import chat_template
from forge_env.tools.call_syntax import SYNTAXES
from forge_env.tools.chat_template import ERRORS, ChatTemplate

QUESTION = [{"role": "user", "content": "q"}]


def render(text: str, messages: list[dict[str, Any]] = QUESTION, **options: Any) -> str:
    return ChatTemplate({"default": text}, {"eos_token": "</s>"}, "test").render(messages, **options)


@pytest.mark.parametrize(
    "text",
    [
        "{{ 'a' * 10**9 }}",
        "{{ [0] * 10**9 }}",
        "{{ 10**10**10 }}",
        "{% set ns = namespace(a='aa') %}{% for i in range(60) %}{% set ns.a = ns.a ~ ns.a %}{% endfor %}",
        "{% set ns = namespace(a='aa') %}{% for i in range(60) %}{% set ns.a = ns.a + ns.a %}{% endfor %}",
        "{% for i in range(99999) %}{{ 'a' * 1000000 }}{% endfor %}",
        "{{ ('a' * 60000).replace('a', 'b' * 60000) }}",
        "{{ ('a' * 60000) | replace('a', 'b' * 60000) }}",
        "{{ ('b' * 60000).join(range(60000)) }}",
        "{{ range(60000) | join('b' * 60000) }}",
        "{{ 'a'.ljust(10**9) }}",
        "{{ 'a' | center(10**9) }}",
        "{{ 'a' | indent(10**9) }}",
        "{{ '%0999999999d' % 1 }}",
        "{{ '{:0999999999d}'.format(1) }}",
        "{{ '{:>99999999}'.format(1) | length }}",
        "{{ 'a'.format_map | length }}",
        "{{ ('{:>99999999}' | attr('format'))(1) | length }}",
        "{{ [1] | tojson(indent=10**9) }}",
        "{{ lipsum(n=10**9) }}",
        "{% macro m() %}{{ m() }}{{ m() }}{% endmacro %}{{ m() }}",
        "{{ messages.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{% include 'other' %}",
    ],
)
def test_a_hostile_template_is_stopped(text: str) -> None:
    with pytest.raises(ERRORS):
        render(text)


@pytest.mark.parametrize(
    "text",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% for a in range(99999) if a < 0 %}{% endfor %}" * 500,
        "{% macro m() %}{% endmacro %}{% for a in range(99999) %}{% for b in range(99999) %}{{ m() }}{% endfor %}"
        "{% endfor %}",
    ],
)
def test_a_template_that_takes_long_is_stopped(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "SECONDS", 0.05)
    with pytest.raises(TemplateError, match=r"takes more than 0.05 s"):
        render(text)


def test_a_template_that_is_no_jinja_names_its_file() -> None:
    with pytest.raises(UsageError, match="the chat template in test can't be compiled"):
        render("{% broken")


def test_templates_have_what_transformers_gives_them() -> None:
    text = (
        "{%- for m in messages %}\n  {%- generation %}{{ m.content | trim }}{% endgeneration %}\n"
        "  {%- if loop.first %}{% continue %}{% endif %}{{ 'é<' | tojson }}{% endfor -%}\n"
        "{{ eos_token }}{{ strftime_now('%Y') | length }}{{ enable_thinking }}{{ [1] | tojson(indent=1) }}{{ tools }}"
        "{{ documents }}"
    )
    messages = [{"role": "user", "content": " a "}, {"role": "user", "content": "b"}]
    assert render(text, messages, enable_thinking=True) == 'ab"é<"</s>4True[\n 1\n]NoneNone'
    with pytest.raises(TemplateError, match="no system"):
        render("{{ raise_exception('no system') }}")


@pytest.mark.parametrize(
    ("listed", "names"),
    [
        ([{"name": "tool_use", "template": "a"}], "tool_use"),
        ([{"template": "a"}], "None"),
        ([{"name": "default", "template": 5}], "none"),
        ([5], "none"),
        (5, "none"),
    ],
)
def test_several_templates_need_a_default(listed: Any, names: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": listed}))
    with pytest.raises(UsageError, match=rf"has no default chat template; its templates are: {names} \("):
        ChatTemplate.of(tmp_path)


@pytest.mark.parametrize("file", ["tokenizer_config.json", "chat_template.json"])
def test_error_messages_name_the_file_of_the_template(file: str, tmp_path: Path) -> None:
    (tmp_path / file).write_text(json.dumps({"chat_template": {"default": "a", "tool_use": "b"}}))
    read = ChatTemplate.of(tmp_path)
    assert read is not None
    assert (read.source, read.render([]), read.render([], [{}])) == (str(tmp_path / file), "a", "b")


@pytest.mark.parametrize(
    ("vllm", "text", "expected"),
    [
        ("llama3_json", '{"name": "f", "parameters": {"a": 1}}', [("f", '{"a": 1}')]),
        ("llama3_json", '<|python_tag|>{"name": "f"}', [("f", "{}")]),
        ("llama3_json", '<|python_tag|>{"name": "f", "arguments": {}}; {"name": "g"}', [("f", "{}"), ("g", "{}")]),
        ("llama3_json", '{"name": "f", "parameters": {', [("", '{"name": "f", "parameters": {')]),
        ("llama3_json", '{"answer": 42}', []),
        ("llama3_json", 'I call {"name": "f"}', []),
        ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}, "id": "abc"}]', [("f", '{"a": 1}')]),
        ("mistral", '[TOOL_CALLS]f{"a": 1}[TOOL_CALLS]g[CALL_ID]x[ARGS]{}', [("f", '{"a": 1}'), ("g", "{}")]),
        ("mistral", '[TOOL_CALLS]f{"a": "[TOOL_CALLS]"}, g{}</s>', [("f", '{"a": "[TOOL_CALLS]"}'), ("g", "{}")]),
        ("mistral", "[TOOL_CALLS]f[ARGS]{bad}[TOOL_CALLS]g[ARGS]{}", [("f", "{bad}"), ("g", "{}")]),
        ("mistral", '[TOOL_CALLS]f{"a": 1', [("f", '{"a": 1')]),
        ("llama3_json", '{"name": "Ada", "age": 5}', []),
        ("llama3_json", '{"parameters": {"a": 1}, "name": "f"}', [("f", '{"a": 1}')]),
        ("mistral", "[TOOL_CALLS]nothing", [("", "nothing")]),
        ("mistral", "[TOOL_CALLS] [{'name'", [("", "{'name'")]),
        ("mistral", "none", []),
        (
            "qwen3_coder",
            "<tool_call>\n<function=f>\n<parameter=a>\nx = 1\ny\n</parameter>\n<parameter=b>\n2\n</parameter>\n"
            "</function>\n</tool_call>",
            [("f", '{"a": "x = 1\\ny", "b": 2}')],
        ),
        ("gemma4", '<|tool_call>call:f{a b:[1,{c:<|"|>}"<|"|>}]}<tool_call|>', [("f", '{"a b": [1, {"c": "}\\""}]}')]),
        ("gemma4", "<|tool_call>call:f{}<tool_call|><|tool_call>call:g{x:true}", [("f", "{}"), ("g", '{"x": true}')]),
        ("gemma4", "<|tool_call>call:f{a:b}<tool_call|>", [("f", '{"a":b}')]),
        ("gemma4", "<|tool_call>call:f{ a : 1 , b : 2 }<tool_call|>", [("f", '{"a": 1, "b": 2}')]),
        ("gemma4", "<|tool_call>f", [("", "f")]),
        ("openai", '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}', [("f", '{"a": 1}')]),
        ("openai", " to=functions.f<|channel|>commentary json<|message|>{bad", [("f", "{bad")]),
        ("openai", "to=f", []),
        ("qwen3_coder", "<function=f>\n<parameter=a>\nx", [("f", '{"a": "x"}')]),
    ],
)
def test_calls_are_read(vllm: str, text: str, expected: list[tuple[str, str]]) -> None:
    [syntax] = [syntax for syntax in SYNTAXES if syntax.vllm == vllm]
    assert syntax.read is not None
    content, calls = syntax.read(text)
    assert [(call.function.name, call.function.arguments) for call in calls] == expected
    assert content == ("" if expected else text)


@pytest.mark.parametrize(
    ("written", "most"),
    [
        ("", 0),
        ("{{ m.tool_calls[0].function.name }}", 1),
        ("{% for c in m.tool_calls %}{{ c.function.name }}{% endfor %}", 2),
    ],
)
def test_calls_that_a_template_would_leave_out_are_refused(written: str, most: int) -> None:
    text = "{% for m in messages %}{% if m.tool_calls %}" + written + "{% endif %}{% endfor %}"
    calls = [{"id": name, "type": "function", "function": {"name": name, "arguments": "{}"}} for name in "fg"]
    for count in (1, 2):
        messages = [*QUESTION, {"role": "assistant", "content": "", "tool_calls": calls[:count]}]
        if count <= most:
            assert render(text, messages) == "fg"[:count]
        else:
            with pytest.raises(TemplateError, match=f"writes {most} of the {count} tool calls in a message"):
                render(text, messages)


def test_calls_may_be_written_only_by_the_template_for_tools() -> None:
    """As in Hermes 2 Pro."""
    text = "{% for m in messages %}{% for c in m.tool_calls %}{{ c.function.name }}{% endfor %}{% endfor %}"
    template = ChatTemplate({"default": "plain", "tool_use": text}, {}, "a test")
    calls = [{"id": name, "type": "function", "function": {"name": name, "arguments": "{}"}} for name in "fg"]
    messages = [*QUESTION, {"role": "assistant", "content": "", "tool_calls": calls}]
    assert template.render(messages, [{}]) == "fg"
    with pytest.raises(TemplateError, match=r"writes 0 of the 2 tool calls in a message: use model\.tools=text"):
        template.render(messages)


@pytest.mark.parametrize(
    ("written", "expected"),
    [("c.function.arguments | items | list", "[('arguments', '{bad')]"), ("c.function.arguments | tojson", '"{bad"')],
)
def test_a_call_that_could_not_be_parsed_is_written(written: str, expected: str) -> None:
    text = "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ " + written + " }}{% endfor %}{% endfor %}"
    call = {"id": "call_0", "type": "function", "function": {"name": "f", "arguments": "{bad"}}
    assert render(text, [*QUESTION, {"role": "assistant", "content": "", "tool_calls": [call]}]) == expected
