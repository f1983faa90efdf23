"""Which parsers vLLM is started with for a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import forge_env as fe
from forge_env.config.finding import bundled_models
from forge_env.endpoint import vllm_server
from forge_env.endpoint.chat_format import ChatFormat, template_thinks
from forge_env.errors import UsageError
from forge_env.tools.chat_template import ChatTemplate

OFF = '{"enable_thinking": false, "thinking": false}'
ON = '{"enable_thinking": true, "thinking": true}'


def flags(chat_format: ChatFormat) -> list[str | None]:
    found = chat_format.vllm_flags()
    names = ("--tool-call-parser", "--reasoning-parser", "--default-chat-template-kwargs")
    return [found[name][0] if name in found else None for name in names]


def checkpoint(folder: Path, template: str = "", **config: Any) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return folder


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("Qwen/Qwen3-4B", ["hermes", "qwen3", None]),
        ("Qwen/Qwen3-4B-Instruct-2507", ["hermes", "qwen3", OFF]),
        ("Qwen/Qwen3-0.6B", ["hermes", "qwen3", None]),
        ("Qwen/Qwen3.5-2B", ["qwen3_coder", "qwen3", None]),
        ("Qwen/Qwen3-Coder-30B-A3B-Instruct", ["qwen3_coder", "qwen3", OFF]),
        ("meta-llama/Llama-3.2-1B-Instruct", ["llama3_json", None, None]),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", ["hermes", "deepseek_r1", None]),
        ("openai/gpt-oss-20b", ["openai", "openai_gptoss", None]),
        ("org/model", ["hermes", None, None]),
    ],
)
def test_models_of_the_hub(model: str, expected: list[str | None]) -> None:
    assert flags(ChatFormat.of(model)) == expected


def test_a_family_s_parser_is_not_used_for_a_template_without_tools(tmp_path: Path) -> None:
    """SmolLM2 is of Llama's architecture, but has none of the tokens that Llama's parser needs."""
    model = checkpoint(tmp_path / "model", "{{ messages[0].content }}", model_type="llama")
    assert flags(ChatFormat.of(str(model))) == ["hermes", None, None]


def test_a_bundled_model_does_not_think() -> None:
    model = str(bundled_models()["coding_rlvr_base"])
    assert flags(ChatFormat.of(model)) == ["hermes", "qwen3", OFF]


@pytest.mark.parametrize(("renderer", "tools"), [("qwen3", "hermes"), ("prime-qwen3", "qwen3_coder")])
@pytest.mark.parametrize("thinking", [True, False])
def test_checkpoint_has_the_format_of_its_recipe(renderer: str, tools: str, thinking: bool, tmp_path: Path) -> None:
    model = checkpoint(tmp_path / "run" / "checkpoints" / "step-000010" / "model", model_type="qwen3")
    recipe = f"model: {{renderer: {renderer}, thinking: {str(thinking).lower()}}}\n"
    (tmp_path / "run" / "config.yaml").write_text(recipe)
    assert flags(ChatFormat.of(str(model))) == [tools, "qwen3", ON if thinking else OFF]


QWEN = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + m.content }}{% endfor %}"
    "{% if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "thinks"),
    [
        ("{{ messages[0].content }}", False),
        (QWEN, True),
        ("{{ messages[0].content }}{% if add_generation_prompt %}{{ '<think>\n' }}{% endif %}", True),
        ("{{ '<think>\n\n</think>' if not enable_thinking }}", False),
        ("{{ '<|think|>' if enable_thinking }}", False),
        ("{{ '<|channel|>analysis<|message|>' ~ m.thinking if m is defined else '' }}", True),
        ("{{ m.content.split('</think>')[-1] if m is defined else '' }}", False),
        ("{{ raise_exception('no tools: think') }}", True),
    ],
)
def test_a_template_shows_whether_its_model_thinks(template: str, thinks: bool, tmp_path: Path) -> None:
    model = checkpoint(tmp_path / "model", template, model_type="qwen3")
    read = ChatTemplate.of(model)
    assert read is not None
    assert template_thinks(read) is thinks
    assert flags(ChatFormat.of(str(model))) == ["hermes", "qwen3", None if thinks else OFF]


def test_the_text_part_of_gemma_4_uses_its_reasoning_parser(tmp_path: Path) -> None:
    model = checkpoint(tmp_path / "model", "{{ '<|think|>' if enable_thinking }}", model_type="gemma4_text")
    assert flags(ChatFormat.of(str(model)))[1:] == ["gemma4", OFF]


@pytest.mark.parametrize("given", [["--reasoning-parser", "hf"], ["--reasoning-parser=hf"]])
def test_flags_of_the_user_count(given: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_server, "check_checkpoint", lambda model: model)
    server = vllm_server.VLLMServer("Qwen/Qwen3-4B", Path("log"), given)
    server.uds = "socket"
    command = server._command()
    assert command[-len(given) :] == given
    assert sum(word.startswith("--reasoning-parser") for word in command) == 1


PLAIN = "{% for m in messages %}{{ '<|im_start|>' + m.role + m.content }}{% endfor %}"


@pytest.mark.stack
def test_tools_that_a_template_does_not_show_are_refused_before_vllm_starts(tmp_path: Path) -> None:
    model = checkpoint(tmp_path / "model", PLAIN, model_type="llama")
    with pytest.raises(UsageError, match=r"calculator has tools, and .* doesn't show tools to the model") as caught:
        fe.evaluate("calculator", f"vllm:{model}", num_tasks=1, out=str(tmp_path / "out"))
    assert caught.value.fix == "describe them as text: --tools text"


def test_a_model_trained_with_tools_as_text_is_offered_no_others(tmp_path: Path) -> None:
    model = checkpoint(tmp_path / "run" / "checkpoints" / "step-000010" / "model", PLAIN, model_type="llama")
    (tmp_path / "run" / "config.yaml").write_text("model: {renderer: chatml, tools: text}\n")
    chat_format = ChatFormat.of(str(model))
    assert "model.tools=text" in (chat_format.refusal_of_tools() or "")
    assert flags(chat_format)[0] == "hermes"
    assert chat_format.vllm_flags()["--chat-template"][0].endswith("chatml.jinja")
