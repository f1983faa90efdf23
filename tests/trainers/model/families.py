"""Folders with the chat templates of model families, and small tokenizers with their control tokens."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

TEMPLATES = Path(__file__).with_name("templates")
_CHATML = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
_TOOLS = ("<tool_call>", "</tool_call>")
_THOUGHTS = ("<tool_response>", "</tool_response>", "<think>", "</think>")
_MISTRAL = (
    *("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
)
_LLAMA = (
    *("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>"),
    "<|python_tag|>",
)
_GEMMA_4 = (
    *("<bos>", "<eos>", "<|turn>", "<turn|>", "<|think|>", "<|channel>", "<channel|>", "<|tool>", "<tool|>"),
    *("<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>", '<|"|>'),
)
_HARMONY = (
    *("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>"),
    *("<|startoftext|>", "<|endoftext|>"),
)
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
"""Llama 3's way to split words, of which Qwen's is a variant."""


@dataclass(frozen=True)
class Family:
    """What a family's folder has.

    Attributes:
        tokens: control tokens.
        bos: token that begins a conversation.
        eos: token that ends one.
        tools: whether its template has tools that forge-env can offer.
        thinks: whether its template has a switch for thinking.
        thoughts: key of a message's thoughts; None if the template has none.
        system: whether its template takes a system message.
        alternates: whether its template demands that questions and answers alternate.
        single_calls: whether its template takes only one call a turn.
    """

    tokens: tuple[str, ...]
    bos: str | None
    eos: str
    tools: bool = True
    thinks: bool = False
    thoughts: str | None = None
    system: bool = True
    alternates: bool = False
    single_calls: bool = False


FAMILIES = {
    "smollm2": Family(_CHATML, None, "<|im_end|>", tools=False),
    "qwen2_5": Family((*_CHATML, *_TOOLS), None, "<|im_end|>"),
    "qwen3": Family((*_CHATML, *_TOOLS, *_THOUGHTS), None, "<|im_end|>", thinks=True, thoughts="reasoning_content"),
    "qwen3_instruct_2507": Family((*_CHATML, *_TOOLS), None, "<|im_end|>"),
    "qwen3_5_think": Family(
        (*_CHATML, *_TOOLS, *_THOUGHTS), None, "<|im_end|>", thinks=True, thoughts="reasoning_content"
    ),
    "llama3_1": Family(_LLAMA, "<|begin_of_text|>", "<|eot_id|>", single_calls=True),
    "llama3_2": Family(_LLAMA, "<|begin_of_text|>", "<|eot_id|>", single_calls=True),
    "mistral_v3": Family(_MISTRAL, "<s>", "</s>", alternates=True),
    "mistral_v7_tekken": Family(_MISTRAL, "<s>", "</s>", tools=False),
    "gemma3": Family(
        ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"), "<bos>", "<eos>", tools=False, alternates=True
    ),
    "gemma4": Family(_GEMMA_4, "<bos>", "<turn|>", thinks=True, thoughts="reasoning_content"),
    "gpt_oss": Family(_HARMONY, "<|startoftext|>", "<|return|>", single_calls=True, thoughts="thinking"),
    "phi3_5": Family(
        ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|endoftext|>"), None, "<|endoftext|>", tools=False
    ),
    "phi4": Family((*_CHATML, "<|im_sep|>"), None, "<|im_end|>", tools=False),
}


def family_folder(folder: Path, name: str, *, template: str | None = None) -> Path:
    """Write a folder with a family's tokenizer of single bytes and a template."""
    family = FAMILIES[name]
    folder.mkdir(parents=True, exist_ok=True)
    byte_tokens = {letter: index for index, letter in enumerate(pre_tokenizers.ByteLevel.alphabet())}
    merges = [("Ġ", "t"), ("h", "e"), ("Ġt", "he"), ("Ċ", "Ċ"), ("}", "}")]
    for first, second in merges:
        byte_tokens[first + second] = len(byte_tokens)
    tokenizer = Tokenizer(models.BPE(byte_tokens, merges))
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(_WORDS), "isolated"), bytes_of])
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token in family.tokens if token not in (*_TOOLS, *_THOUGHTS)]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in family.tokens if token not in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": family.eos}
    if family.bos is not None:
        settings["bos_token"] = family.bos
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    text = (TEMPLATES / f"{template or name}.jinja").read_text(encoding="utf-8")
    (folder / "chat_template.jinja").write_text(text, encoding="utf-8")
    return folder
