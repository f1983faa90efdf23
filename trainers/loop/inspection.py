"""The description of a model that `forge-env model inspect` prints: family, chat format, memory, and what is wrong."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from forge_env.config.recipe import LoRASection, ModelSection, OptimizerSection, TrainerSection
from forge_env.endpoint.chat_format import ChatFormat
from forge_env.errors import ForgeError, UsageError
from trainers.loop.checks import check_checkpoint
from trainers.model.adapter import adapter_parameters, layer_shapes
from trainers.model.folder import TINY, local_folder, rope_parameters, tensors_in, weight_files
from trainers.plan.memory import BYTES, FLOAT32, GIB, Layout, trainer_memory
from trainers.plan.shape import Shape, named_config


def inspect(path: str) -> Iterator[tuple[str, str]]:
    """Yield subjects and texts on a model that `model.path` of a recipe may name."""
    if path == TINY:
        raise UsageError(
            "the model tiny is built when a run starts, in the shape of model.tiny",
            fix="see its memory with forge-env train RECIPE --plan",
        )
    folder = local_folder(path)
    hf = named_config(path)
    shape = Shape.of(hf, path)
    words = "tied to the head" if shape.tied else "apart from the head"
    yield "family", f"{hf['model_type']}: {shape.layers} layers of width {shape.dim}"
    yield "parameters", f"{shape.parameters / 1e6:,.1f} million; embedding of {shape.vocabulary:,} tokens, {words}"
    if longest := hf.get("max_position_embeddings"):
        yield "context", f"{longest:,} tokens at most"
    if (rope := rope_parameters(hf))["rope_type"] == "longrope":
        original = f"{rope['original_max_position_embeddings']:,}"
        yield (
            "positions",
            f"long factors if model.max_length exceeds {original}, for every sequence, as in vLLM; "
            f"transformers uses them for sequences of more than {original} tokens only",
        )
    if folder is not None:
        yield "files", _files(folder)
        yield from _chat(folder)
    else:
        yield "files", "on the Hugging Face hub; a run downloads them"
    yield from _memory(shape, hf)
    yield "trains", _trains(folder, path)


def _files(folder: Path) -> str:
    kinds = sorted({kind for kind, _ in tensors_in(folder).values()}) if weight_files(folder) else ["no file"]
    size = sum(file.stat().st_size for file in weight_files(folder)) / GIB
    return f"{size:.2f} GiB in {', '.join(kinds)}; {folder}"


def _chat(folder: Path) -> Iterator[tuple[str, str]]:
    chat = ChatFormat.of(str(folder))
    if chat.template is None:
        yield "chat format", "none in the folder: set one, such as model.renderer=chatml"
        return
    yield "chat format", f"its template; it {'thinks before it answers' if chat.thinks else 'answers at once'}"
    refusal = chat.refusal_of_tools()
    text = "native" if refusal is None else f"as text (model.tools=text, eval --tools text): {Path(refusal).name}"
    yield "tools", text


def _memory(shape: Shape, hf: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield what a generator and a trainer on the CPU take, with the default recipe's keys."""
    tokens = TrainerSection().microbatch_tokens
    weights = ", ".join(f"{shape.parameters * size / GIB:.2f} GiB in {dtype}" for dtype, size in BYTES.items())
    cache = shape.kv_bytes(BYTES["bfloat16"]) * 1000 / GIB
    yield "generator", f"{weights}; keys and values of 1,000 tokens {cache:.3f} GiB in bfloat16"
    lora = LoRASection()
    sides = layer_shapes(hf)
    trained = adapter_parameters(lora, hf)
    kinds = (("all weights", 0, None), (f"LoRA, rank {lora.rank}", lora.rank * len(sides), trained))
    for name, adapters, count in kinds:
        memory = trainer_memory(
            shape,
            Layout(device="cpu", adapters=adapters),
            OptimizerSection(),
            tokens=tokens,
            targets=tokens // 2,
            trained=count,
        )
        saved = 3 * FLOAT32 * (count or shape.parameters) / GIB
        text = f"{memory.peak / GIB:.2f} GiB for microbatches of {tokens:,} tokens; {saved:.2f} GiB for a checkpoint"
        yield f"training {name}", text


def _trains(folder: Path | None, path: str) -> str:
    if folder is None:
        return "its family can be trained; the files are checked after their download"
    try:
        check_checkpoint(folder, ModelSection(path=path, max_length=1))  # takes seconds: it imports torch
    except ForgeError as error:
        return f"no: {error}"
    return "yes: all weights or LoRA"
