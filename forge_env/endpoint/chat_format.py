"""Chat format of a checkpoint: its vLLM parsers, and whether the model thinks before it answers."""

from __future__ import annotations

import json
import logging
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import yaml

from forge_env.errors import UsageError
from forge_env.plugins import installed, load_entry
from forge_env.reading import LARGEST_RECIPE, UnsafeFileError, read_text
from forge_env.tools.chat_template import CHATML, ERRORS, ChatTemplate, settings_in
from forge_env.types import Message, ToolSpec

log = logging.getLogger(__name__)


class TokenReader(Protocol):
    """The trainer's chat format, which reads sampled tokens."""

    @property
    def stop_token_ids(self) -> list[int]:
        """Tokens that end an assistant turn; a server knows only those of the folder's settings."""

    def parse(self, token_ids: list[int], tools: list[ToolSpec], prompt_ids: list[int]) -> Message:
        """Parse sampled tokens into an assistant message."""


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
"""Chat format (a name of the `renderers` library) -> vLLM's parsers of tool calls and of thoughts."""
HERMES = ("hermes", "deepseek_r1")
"""Parsers for unknown formats: Qwen 2.5, Hermes, and models distilled from DeepSeek R1."""
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
"""Patterns of model names on the hub and their formats; the first match is used."""
_ANSWERS_AT_ONCE = r"instruct|coder|base|non-?thinking"
"""Names of non-thinking models in families that think."""
_THINKS = r"deepseek-?r1|qwq"
"""Names of thinking models in families that don't think."""
_BY_TYPE = {
    "deepseek_v3": "deepseek-v3",
    "gemma4": "gemma4",
    "gemma4_text": "gemma4",
    "gemma4_unified": "gemma4",
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
    """The chat format of a checkpoint.

    Attributes:
        name: as `model.renderer` names it; None if unknown.
        thinks: whether the model thinks before it answers, unless a request says otherwise.
        chosen: whether `thinks` comes from the training recipe and overrides the chat template's default.
        family: the format of `PARSERS` that the model's family has; None if unknown.
        template: the chat template that it is served with; None if its folder has none, or it is on the hub.
        text_tools: whether the training recipe describes tools as text.
    """

    name: str | None
    thinks: bool
    chosen: bool = False
    family: str | None = None
    template: ChatTemplate | None = None
    text_tools: bool = False

    @classmethod
    def of(cls, model: str) -> ChatFormat:
        """The format of a checkpoint, from its recipe if a run of forge-env wrote it, otherwise from its folder."""
        folder = Path(model)
        if not folder.is_dir():
            name = next((name for pattern, name in _BY_NAME if re.search(pattern, model, re.IGNORECASE)), None)
            pattern = _ANSWERS_AT_ONCE if name else _THINKS
            thinks = (re.search(pattern, model, re.IGNORECASE) is None) is (name is not None)
            return cls(name, thinks, family=name)
        template = _template(folder)
        kind = settings_in(folder / "config.json").get("model_type")
        family = _BY_TYPE.get(kind) if isinstance(kind, str) else None
        if (trained := _recipe_of(folder)) is not None:
            name = str(trained.get("renderer", "qwen3"))
            return cls(
                name,
                bool(trained.get("thinking", False)),
                chosen=True,
                family=name if name in PARSERS else family,
                template=ChatTemplate.chatml() if name == "chatml" else template,
                text_tools=trained.get("tools") == "text",
            )
        return cls(
            "auto" if template else family,
            thinks=template is not None and template_thinks(template),
            family=family,
            template=template,
        )

    def vllm_flags(self) -> dict[str, list[str]]:
        """Flags that make vLLM's server parse turns as the trainer does."""
        tools, thoughts = PARSERS.get(self.family or "", HERMES if self.thinks else (HERMES[0], None))
        if self._templated is not None and self._templated.call_syntax is not None:
            tools = self._templated.call_syntax.vllm
        elif self.refusal_of_tools() is not None:
            tools = HERMES[0]  # unused; vLLM refuses those of a family whose tokens the model lacks
        flags = {"--enable-auto-tool-choice": [], "--tool-call-parser": [tools]}
        if self.name == "chatml":
            flags["--chat-template"] = [str(CHATML)]
        if thoughts is not None:
            flags["--reasoning-parser"] = [thoughts]
            if self.chosen or not self.thinks:  # otherwise the parsers read an answer without thoughts as thoughts
                switches = {"enable_thinking": self.thinks, "thinking": self.thinks}
                flags["--default-chat-template-kwargs"] = [json.dumps(switches)]
        return flags

    @property
    def _templated(self) -> ChatTemplate | None:
        """The template that defines the format; None if the `renderers` library does."""
        return self.template if self.name in ("auto", "chatml") else None

    def refusal_of_tools(self) -> str | None:
        """The reason why the model can't be offered native tools; None if it can."""
        if self.text_tools:
            return "the model was trained with tools as text (model.tools=text)"
        reason = self._templated.refusal_of_tools() if self._templated is not None else None
        return None if reason is None or self.template is None else f"{self.template.source} {reason}"

    def reader(self, model: str) -> TokenReader | None:
        """The trainer's chat format of a folder; None if the trainer is not installed or doesn't know the format."""
        entry = installed("forge_env.chat_formats").get("renderers")
        if entry is None or self.name is None or not Path(model).is_dir():
            return None
        reader: TokenReader | None = load_entry(entry)(Path(model), self.name)
        return reader


def template_thinks(template: ChatTemplate) -> bool:
    """Whether a chat template lets the model think by default.

    The rendered prompt opens the thoughts, or opens and closes them. If it does neither, the model thinks if the
    template has a switch for thinking that is on by default, or gpt-oss's channel for thoughts.
    """
    if "think" not in template.text:
        return False
    question = [{"role": "user", "content": "?"}]
    try:
        prompt = template.render(question, generation=True)
        silent = template.render(question, generation=True, enable_thinking=False)
    except ERRORS:
        return True  # it mentions thinking, but can't be rendered with a question alone
    opened, closed = prompt.rfind("<think>"), prompt.rfind("</think>")
    return opened > closed or (opened < 0 and (prompt != silent or "<|channel|>analysis" in template.text))


def _template(folder: Path) -> ChatTemplate | None:
    try:
        return ChatTemplate.of(folder)
    except UsageError as error:
        log.warning("%s", error)
        return None


def _recipe_of(folder: Path) -> dict[str, Any] | None:
    """The `model` section of the recipe of the run that wrote a checkpoint."""
    for parent in folder.resolve().parents[:4]:
        if parent.name == "checkpoints" and (file := parent.parent / "config.yaml").is_file():
            try:
                recipe = yaml.safe_load(read_text(file, largest=LARGEST_RECIPE))
            except (OSError, ValueError, yaml.YAMLError, UnsafeFileError):
                return None
            model = recipe.get("model") if isinstance(recipe, dict) else None
            return model if isinstance(model, dict) else None
    return None
