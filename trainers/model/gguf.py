"""Conversion of GGUF files, the format of llama.cpp, to checkpoint folders.

transformers reads the config, the tensors and the vocabulary. How a tokenizer splits a text into words is in the file
by name only (`tokenizer.ggml.pre`), and transformers ignores it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from forge_env.errors import UsageError
from forge_env.files import written_whole
from trainers.model.folder import check_hf_config
from trainers.model.parts import Part
from trainers.model.writer import write_model

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_OTHERS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}


def _split(pattern: str) -> dict[str, Any]:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [split, {**_BYTES, "use_regex": False}]}


ARCHITECTURES = ("llama", "qwen2", "qwen3")
"""Supported values of `general.architecture`."""
_DIGITS = {"type": "Digits", "individual_digits": True}
PRE_TOKENIZERS: Mapping[str, dict[str, Any]] = {
    "gpt-2": {**_BYTES, "use_regex": True},
    "smollm": {"type": "Sequence", "pretokenizers": [_DIGITS, {**_BYTES, "use_regex": True}]},
    "qwen2": _split(_CONTRACTIONS + r"\p{N}" + _OTHERS),
    "llama-bpe": _split(_CONTRACTIONS + r"\p{N}{1,3}" + _OTHERS),
}
"""Splitting into words, in the format of `tokenizers`, by `tokenizer.ggml.pre` of files with byte-level tokens."""


def convert(file: Path, out: Path, *, tell: Callable[[str], object]) -> None:
    """Write a GGUF file as a Hugging Face folder in bfloat16, completely or not at all.

    `tell` is called with a line on the precision.

    Raises:
        UsageError: it isn't a GGUF file, or its model family or its tokenizer is not supported.
    """
    from gguf import GGUFReader

    try:
        reader = GGUFReader(file)
    except (ValueError, OSError, IndexError) as error:
        raise UsageError(f"{file} is not a GGUF file: {error}", fix="give a file of llama.cpp") from error
    if refusal := _refusal(reader):
        raise UsageError(f"{file} {refusal}", fix="use the model's checkpoint folder")
    tensors, config = _weights(file, reader)
    with written_whole(out) as staging:
        files = {"config.json": config, **_tokenizer(file, reader, config)}
        companions = {name: json.dumps(value, indent=2, ensure_ascii=False).encode() for name, value in files.items()}
        if (template := _text(reader, "tokenizer.chat_template")) is not None:
            companions["chat_template.jinja"] = template.encode()
        write_model(Part.all_of(tensors), companions, staging, dtype=torch.bfloat16)
    tell(_precision(reader, tensors))


def _refusal(reader: Any) -> str | None:
    """The reason why a file can't be converted; None if it can. transformers would ignore these features."""
    kind = _text(reader, "general.architecture")
    if kind not in ARCHITECTURES:
        return f"has the architecture {kind!r}, which is not supported: only {', '.join(ARCHITECTURES)} are"
    if (parts := reader.get_field("split.count")) is not None and parts.contents() > 1:
        return f"is one of the {parts.contents()} files of a model: merge them with llama-gguf-split of llama.cpp"
    scaling = _text(reader, f"{kind}.rope.scaling.type") or "none"
    if scaling != "none" or any(tensor.name == "rope_freqs.weight" for tensor in reader.tensors):
        return "has scaled rotary positions, which are not converted"
    return None


def _weights(file: Path, reader: Any) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Dequantized float32 tensors by their Hugging Face names, and `config.json`."""
    from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    try:
        config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    except (ValueError, KeyError) as error:
        raise UsageError(f"the model in {file} is not supported: {error}", fix="use a checkpoint folder") from error
    width = reader.get_field(f"{_text(reader, 'general.architecture')}.attention.key_length")
    if width is not None:  # transformers ignores it for some families
        config.head_dim = int(width.contents())
    usual = PretrainedConfig().to_dict()
    settings = {name: value for name, value in config.to_dict().items() if name[0] != "_" and value != usual.get(name)}
    check_hf_config(settings, str(file))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    settings |= {"architectures": [type(model).__name__], "dtype": "bfloat16"}
    tensors = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=model)["tensors"]
    absent = sorted(name for name, _ in model.named_parameters() if name not in tensors)  # a tied head counts once
    if absent or len(tensors) != len(reader.tensors):
        what = f"lacks {absent[0]}" if absent else f"has tensors that a {settings['model_type']} model lacks"
        raise UsageError(f"{file} {what}", fix="use the model's checkpoint folder")
    return tensors, settings


def _tokenizer(file: Path, reader: Any, config: Mapping[str, Any]) -> dict[str, Any]:
    """The contents of `tokenizer.json`, `tokenizer_config.json` and `generation_config.json`."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    if _text(reader, "tokenizer.ggml.model") == "gpt2":
        pre = _text(reader, "tokenizer.ggml.pre") or "gpt-2"
        if pre not in PRE_TOKENIZERS:
            raise UsageError(
                f"the tokenizer of {file} splits words by the rule {pre!r}, which is not supported",
                fix=f"use the model's checkpoint folder; supported are {', '.join(PRE_TOKENIZERS)}",
            )
        content["pre_tokenizer"] = PRE_TOKENIZERS[pre]
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items() if isinstance(token, str)}
    ends = {"bos_token_id": config.get("bos_token_id"), "eos_token_id": config.get("eos_token_id")}
    return {
        "tokenizer.json": content,
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", **special},
        "generation_config.json": {name: number for name, number in ends.items() if number is not None},
    }


def _text(reader: Any, key: str) -> str | None:
    """A text of the file's metadata, or None."""
    field = reader.get_field(key)
    return None if field is None else str(field.contents())


def _precision(reader: Any, tensors: Mapping[str, torch.Tensor]) -> str:
    """Describe how precisely the file stores the weights, and what rounding to bfloat16 adds."""
    kinds = Counter[str]()
    for tensor in reader.tensors:
        kinds[tensor.tensor_type.name] += int(tensor.n_elements)
    bits = 8 * sum(int(tensor.n_bytes) for tensor in reader.tensors) / sum(kinds.values())
    error = sum(float((each - each.bfloat16().float()).square().sum()) for each in tensors.values())
    size = sum(float(each.square().sum()) for each in tensors.values())
    named = ", ".join(f"{kind} {count / sum(kinds.values()):.1%}" for kind, count in kinds.most_common())
    return (
        f"the file has {bits:.1f} bits a weight ({named}); rounding to bfloat16 adds an error of "
        f"{(error / size) ** 0.5:.2%} of the weights"
    )
