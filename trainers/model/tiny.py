"""A small Qwen3 checkpoint that is built locally: a real Hugging Face folder, without any download."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from forge_env.config.recipe import ModelSection
from forge_env.files import written_whole
from trainers.model.tokenizer import SAMPLES, build_tokenizer, save_tokenizer

FORMAT = 4
"""Version of the files that `build_tiny_folder` writes; a folder cached with another version is rebuilt."""
END_OF_TURN = "<|im_end|>"


def hf_config(model: ModelSection, vocab_size: int, eos_token_id: int) -> dict[str, Any]:
    """The `config.json` of a Qwen3 checkpoint with the shape of `model.tiny`."""
    shape = model.tiny
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": vocab_size,
        "hidden_size": shape.dim,
        "intermediate_size": shape.hidden_dim,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": model.max_length,
        "rms_norm_eps": 1e-6,
        "rope_theta": shape.rope_theta,
        "tie_word_embeddings": True,
        "torch_dtype": model.dtype,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": eos_token_id,
        "initializer_range": 0.02,
        "use_cache": True,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": shape.layers,
    }


def build_tiny_folder(model: ModelSection, environment: Any, seed: int, folder: Path) -> Path:
    """Write config.json and tokenizer files of a fresh small model; the trainer creates the weights.

    The folder appears complete or not at all, so an interrupted build leaves no partial folder in a cache. A folder
    that another run has created meanwhile is not replaced, since that run reads it.
    """
    with written_whole(folder, lambda other: (other / "config.json").is_file()) as staging:
        staging.mkdir()
        _write_tiny(model, environment, seed, staging)
    return folder


def _write_tiny(model: ModelSection, environment: Any, seed: int, staging: Path) -> None:
    tokenizer = write_tokenizer(model, environment, seed, staging)
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    vocab_size = -(-size // 64) * 64  # padded rows keep every matrix a multiple of the kernels' tile
    end_of_turn = tokenizer.token_to_id(END_OF_TURN)
    assert end_of_turn is not None
    config = hf_config(model, vocab_size, end_of_turn)
    (staging / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def write_tokenizer(
    model: ModelSection, environment: Any, seed: int, folder: Path, samples: int = SAMPLES
) -> Tokenizer:
    """Learn a tokenizer from an environment's demonstrations, and write it into a folder with its chat template."""
    renderer = "qwen3" if model.renderer == "auto" else model.renderer
    tokenizer = build_tokenizer(environment, renderer, model.tiny.vocab_size, seed, samples)
    save_tokenizer(tokenizer, folder)
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TURN,
        "pad_token": "<|endoftext|>",
        "model_max_length": model.max_length,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=2) + "\n")
    if renderer == "qwen3":  # so that other servers of the folder render as we do
        (folder / "chat_template.jinja").write_text(chat_template(thinking=model.thinking), encoding="utf-8")
    return tokenizer


def chat_template(*, thinking: bool) -> str:
    """Qwen3's chat template for other servers; `thinking` is the default, which a request can override."""
    template = Path(__file__).with_name("chat_template.jinja").read_text(encoding="utf-8")
    return template.replace("is defined else false", f"is defined else {str(thinking).lower()}", 1)
