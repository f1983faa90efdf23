"""The chat format of a checkpoint: which of vLLM's parsers read it, and whether its model thinks."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from forge_env.plugins import installed, load_entry
from forge_env.types import Message, ToolSpec

TokenReader = Callable[[list[int], list[ToolSpec], list[int]], Message]
"""`(sampled token ids, offered tools, prompt token ids)` to the message that they spell."""

PARSERS: dict[str, tuple[str, str | None]] = {
    "deepseek-r1": ("deepseek_v3", "deepseek_r1"),
    "deepseek-v3": ("deepseek_v3", "deepseek_v3"),
    "gemma4": ("gemma4", "gemma4"),
    "glm-4.5": ("glm45", "glm45"),
    "glm-5": ("glm47", "glm47"),
    "gpt-oss": ("openai", "openai_gptoss"),
    "kimi-k2": ("kimi_k2", "kimi_k2"),
    "llama-3": ("llama3_json", None),
    "minimax-m2": ("minimax_m2", "minimax_m2"),
    "nemotron-3": ("qwen3_coder", "nemotron_v3"),
    "prime-qwen3": ("qwen3_coder", "qwen3"),
    "qwen3": ("hermes", "qwen3"),
    "qwen3.5": ("qwen3_coder", "qwen3"),
}
"""Chat format, by its name in the `renderers` library -> vLLM's parsers of its tool calls and of its thoughts."""
HERMES = ("hermes", "deepseek_r1")
"""Those of formats that are not known: Qwen 2.5, Hermes, and the models distilled from DeepSeek R1."""
_BY_NAME = [
    (r"deepseek-?r1(?!.*distill)", "deepseek-r1"),
    (r"deepseek-?v3", "deepseek-v3"),
    (r"gemma-?4", "gemma4"),
    (r"glm-?4\.5", "glm-4.5"),
    (r"glm", "glm-5"),
    (r"gpt-?oss", "gpt-oss"),
    (r"kimi-?k2", "kimi-k2"),
    (r"llama-?3", "llama-3"),
    (r"minimax-?m2", "minimax-m2"),
    (r"nemotron-?3", "nemotron-3"),
    (r"qwen3\.\d|qwen3-coder", "qwen3.5"),
    (r"qwen-?3", "qwen3"),
]
"""Names of models at the hub that have a format; the first that matches counts."""
_ANSWERS_AT_ONCE = r"instruct|coder|base|non-?thinking"
"""Names of models that don't think, of families that do."""
_THINKS = r"deepseek-?r1|qwq"
"""Names of models that do, of families that don't."""
_BY_TYPE = {
    "deepseek_v3": "deepseek-v3",
    "glm4_moe": "glm-4.5",
    "gpt_oss": "gpt-oss",
    "kimi_k2": "kimi-k2",
    "llama": "llama-3",
    "minimax_m2": "minimax-m2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3",
    "qwen3_5": "qwen3.5",
    "qwen3_5_moe": "qwen3.5",
}
"""`model_type` of a checkpoint's `config.json` -> its format."""


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """How the turns of a checkpoint's model are written.

    Attributes:
        name: in the `renderers` library; None: not known.
        thinks: whether the model thinks before it answers, unless a request says otherwise.
        chosen: `thinks` is what the model was trained with, whatever its chat template does by default.
    """

    name: str | None
    thinks: bool
    chosen: bool = False

    @classmethod
    def of(cls, model: str) -> ChatFormat:
        """The format of a checkpoint: that of its recipe where a run of ours wrote it, else that of its family.

        Args:
            model: a checkpoint's folder, or a name at the hub.
        """
        folder = Path(model)
        if not folder.is_dir():
            name = next((name for pattern, name in _BY_NAME if re.search(pattern, model, re.IGNORECASE)), None)
            pattern = _ANSWERS_AT_ONCE if name else _THINKS
            return cls(name, thinks=(re.search(pattern, model, re.IGNORECASE) is None) is (name is not None))
        if (trained := _recipe_of(folder)) is not None:
            return cls(str(trained.get("renderer", "qwen3")), bool(trained.get("thinking", False)), chosen=True)
        family = _json(folder / "config.json").get("model_type")
        name = _BY_TYPE.get(family) if isinstance(family, str) else None
        return cls(name, thinks=template_thinks(_template(folder)))

    def vllm_flags(self) -> dict[str, list[str]]:
        """The flags with which vLLM's server reads turns as training does."""
        tools, thoughts = PARSERS.get(self.name or "", HERMES if self.thinks else (HERMES[0], None))
        flags = {"--enable-auto-tool-choice": [], "--tool-call-parser": [tools]}
        if thoughts is not None:
            flags["--reasoning-parser"] = [thoughts]
            if self.chosen or not self.thinks:  # else the parsers take an answer without thoughts for thoughts
                switches = {"enable_thinking": self.thinks, "thinking": self.thinks}
                flags["--default-chat-template-kwargs"] = [json.dumps(switches)]
        return flags

    def reader(self, model: str) -> TokenReader | None:
        """Training's own reading of sampled tokens; None: training is not installed, or doesn't know the format."""
        entry = installed("forge_env.chat_formats").get("renderers")
        if entry is None or self.name is None or not Path(model).is_dir():
            return None
        found: TokenReader | None = load_entry(entry)(Path(model), self.name)
        return found


def template_thinks(template: str) -> bool:
    """Whether a chat template lets the model think by default.

    The prompt of a turn shows it: it opens the thoughts, or closes them at once. Where it does neither, the model
    opens them itself if the template has a switch for thinking.
    """
    if "think" not in template:
        return False
    try:
        prompt = _rendered(template)
    except (TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        return True  # it needs more than a question, and it speaks of thinking
    opened, closed = prompt.rfind("<think>"), prompt.rfind("</think>")
    return opened > closed or (opened < 0 and "enable_thinking" in template)


def _rendered(template: str) -> str:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda value, **_: json.dumps(value, ensure_ascii=False)
    environment.globals |= {"raise_exception": _refuse, "strftime_now": lambda form: ""}
    question = [{"role": "user", "content": "?"}]
    return environment.from_string(template).render(
        messages=question, add_generation_prompt=True, bos_token="", eos_token=""
    )


def _refuse(message: str) -> None:
    raise TemplateError(message)


def _template(folder: Path) -> str:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8", errors="replace")
    template = _json(folder / "tokenizer_config.json").get("chat_template")
    return template if isinstance(template, str) else ""


def _recipe_of(folder: Path) -> dict[str, Any] | None:
    """The model's part of the recipe of the run in whose folder a checkpoint is."""
    for parent in folder.resolve().parents[:4]:
        if parent.name == "checkpoints" and (file := parent.parent / "config.yaml").is_file():
            try:
                recipe = yaml.safe_load(file.read_text(encoding="utf-8"))
            except (OSError, ValueError, yaml.YAMLError):
                return None
            model = recipe.get("model") if isinstance(recipe, dict) else None
            return model if isinstance(model, dict) else None
    return None


def _json(file: Path) -> dict[str, Any]:
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}
