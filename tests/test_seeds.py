"""What docs/seeds.md names exists: the commands that show it read their recipes; nothing is trained."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path

import pytest

from forge_env.cli.main import build_parser
from forge_env.config.finding import read_run
from forge_env.config.reader import build, read_arguments, values
from forge_env.config.recipe import RunConfig

ROOT = Path(__file__).resolve().parent.parent
VARIABLE = re.compile(r"^[A-Z_]+=")


SHOWN = {
    "`ForgeActor`": [
        'python -c "from trainers.actors.actor import ForgeActor as A; A.procs, A.with_gpus, A.num_replicas, '
        'A.mesh_name, A.options, A.as_actor, A.as_service, A.launch, A.shutdown, A.setup"'
    ],
    "`Service`": [
        'python -c "from trainers.actors.service import Service as S; S.call_all, S.get_metrics, '
        'S.get_metrics_summary, S.session, S.start_session, S.terminate_session, S.stop"'
    ],
    "remote exceptions": [
        "python -m pytest tests/trainers/actors/test_service.py::test_calls_sessions_fan_outs_and_errors"
    ],
    "`Generator`": [
        'python -c "from trainers.generator.generator import Generator as G; G.generate, G.update_weights"'
    ],
    "`prefetch_weights_to_shm`, `n_fetcher_procs`, `run`, `get_version`, `get_vllm_config`, `stop`": [
        "python -m benchmarks weights"
    ],
    "`Completion`": [
        'python -c "from trainers.generator.types import Completion as C; [C.__dataclass_fields__[n] for n '
        "in 'prompt text prompt_ids token_ids logprobs stop_reason generator_version metadata tool_calls "
        "content'.split()]\""
    ],
    "`TitanTrainer`": [
        'python -c "from trainers.titan.trainer import TitanTrainer as T; T.setup, T.forward_backward, '
        "T.train_step, T.optim_step, T.clear_gradients, T.push_weights, T.save, T.load, T.get_config, "
        'T.get_status, T.cleanup"'
    ],
    "clipping, accumulation": ["python -m pytest tests/trainers/loop/test_knobs.py::test_turning_it_shows"],
    "`ReferenceModel` on a CPU": ["forge-env config grpo/qwen3_1_7b grpo.reference.with_gpus=false"],
    "no reference model": ["forge-env config grpo/qwen3_1_7b grpo.beta=0"],
    "`RewardActor`": ['python -c "from trainers.rollout.actors import RewardActor as R; R.evaluate_response"'],
    "`MathReward`, `ThinkingReward`": [
        'python -c "from forge_env.rewards import MathReward, ThinkingReward; MathReward(tolerance=1e-3, '
        'partial_credit=0.2), ThinkingReward(partial_reward=0.1, full_reward=1.0)"'
    ],
    "`ReplayBuffer`": [
        'python -c "from trainers.buffer.actor import ReplayBuffer as B; B.add, B.sample, B.evict, B.clear, '
        'B.state_dict, B.load_state_dict"'
    ],
    "`Episode`, `Group`": ['python -c "from forge_env import Trajectory; from trainers.rollout.types import Group"'],
    "`DatasetActor`": ['python -c "from trainers.rollout.actors import DatasetActor as D; D.sample"'],
    "losses": [
        'python -c "from trainers.losses import GRPOLoss, SimpleGRPOLoss, DrGRPOLoss, DAPOLoss, CISPOLoss, '
        "GSPOLoss, SAPOLoss, ReinforceLoss; GRPOLoss(clip_low=0.2, clip_high=0.28, beta=0.1); "
        'ReinforceLoss(clip_ratio=0.2)"'
    ],
    "formulas": ["python -m pytest tests/trainers/losses/test_losses.py::test_value_and_gradient_are_the_formulas"],
    "entropy coefficient, KL k1, k2, k3": [
        "forge-env config coding_rlvr training.entropy_coef=0.01 grpo.beta=0.1 grpo.loss.options.kl=k2"
    ],
    "your own loss": [
        "python -m pytest tests/trainers/losses/test_losses_options.py::test_the_losses_of_the_page_work"
    ],
    "`forward(logprobs, ref_logprobs, advantages, padding_mask)`": [
        "python -m pytest tests/trainers/losses/test_losses_options.py::test_the_documents_contract_is_a_loss"
    ],
    "`inputs`, `targets`": [
        "python -m pytest tests/trainers/titan/test_rows.py::test_rows_become_sequences_without_their_padding"
    ],
    "coding RLVR": ["forge-env train coding_rlvr.yaml"],
    "GRPO on maths": ["python -m apps.grpo.main --config apps/grpo/qwen3_1_7b.yaml"],
    "other models": ["forge-env train apps/grpo/qwen3_8b.yaml", "forge-env train apps/grpo/llama3_8b.yaml"],
    "supervised fine-tuning": [
        "python -m apps.sft.main --config apps/sft/llama3_8b.yaml",
        "python -m apps.sft.main --config apps/sft/qwen3_8b.yaml",
    ],
    "both on two CPU cores": ["forge-env train grpo/math_cpu", "forge-env train sft/math_cpu"],
    "config keys": [
        "python -m pytest "
        "tests/forge_env/config/test_documents.py::test_every_key_acts_and_the_command_line_has_the_last_word"
    ],
    "overrides": [
        "forge-env train grpo/qwen3_1_7b --trainer.procs 4 --generator.procs 4",
        "forge-env train grpo/qwen3_1_7b trainer.procs=4",
    ],
    "`MODEL`": ["MODEL=Qwen/Qwen3-0.6B forge-env config grpo/qwen3_1_7b"],
    "`CONFIG_FILE`": ["CONFIG_FILE=grpo/qwen3_1_7b forge-env train"],
    "`MIN_GPUS`": ["MIN_GPUS=8 forge-env train coding_rlvr"],
    "`WANDB_MODE`": ["WANDB_MODE=offline forge-env train coding_rlvr logging.wandb=true"],
    "`TORCHSTORE_USE_RDMA`": ["TORCHSTORE_USE_RDMA=0 forge-env train coding_rlvr"],
    '"Insufficient GPU resources"': ["forge-env train grpo/qwen3_1_7b"],
    "asynchrony": ["forge-env train coding_rlvr grpo.max_off_policy_steps=0"],
    "SLURM": [
        "sbatch --nodes=2 --gpus-per-node=8 apps/grpo/run_grpo.sh",
        "forge-env job grpo/qwen3_32b --job.kind slurm",
    ],
    "Kubernetes, SkyPilot": [
        "forge-env job grpo/qwen3_32b --job.kind kubernetes",
        "forge-env job grpo/qwen3_32b --job.kind skypilot",
    ],
    "ROCm": ["make setup STACK=rocm PYTHON=python3"],
    "install check": ["python -c \"import torch, forge_env, vllm; print('OK')\""],
    "monitoring": ["python -m pytest tests/apps/test_coding_rlvr.py::test_a_run_to_its_end"],
    "clean shutdown": [
        "python -m pytest tests/apps/test_coding_rlvr.py::test_a_closed_terminal_saves_and_leaves_nothing"
    ],
    "sandboxed execution": ["forge-env sandbox audit"],
    "tools": ["forge-env train tool_use/calculator_cpu", "forge-env train tool_use/qwen3_1_7b"],
    "distillation": ["forge-env train distill/math_cpu", "forge-env train distill/qwen3_1_7b"],
    "weak verifiers": ['python -c "from forge_env.rewards import Ensemble, estimate_accuracies"'],
}
"""The rows of the page, and commands that show what they say."""
COMMANDS = [command for commands in SHOWN.values() for command in commands]


def check_forge_env(words: list[str], variables: dict[str, str]) -> None:
    """The command exists, takes these arguments, and reads the recipe with its overrides."""
    parser = build_parser(words[0])
    args, rest = parser.parse_known_args(words)
    if not args.parser.takes_keys:
        assert not rest
        return
    args.parser.read_rest(args, rest)
    if words[0] in ("train", "config", "job", "plan"):
        [file] = args.words or [variables["CONFIG_FILE"]]
        build(RunConfig, read_run(file, values(args.overrides, RunConfig), variables))


def check_module(name: str, words: list[str]) -> None:
    """The test, benchmark or app is there; an app reads its recipe."""
    if name == "pytest":
        file, _, test = words[0].partition("::")
        names = {node.name for node in ast.walk(ast.parse((ROOT / file).read_text())) if hasattr(node, "name")}
        assert not test or test in names, words[0]
    elif name == "benchmarks":
        assert (ROOT / "benchmarks" / f"{words[0]}.py").is_file()
    else:
        assert (ROOT / f"{name.replace('.', '/')}.py").is_file()
        assert words[0] == "--config"
        assert (ROOT / words[1]).is_file()
        _, overrides = read_arguments(words[2:])
        build(RunConfig, read_run(words[1], values(overrides, RunConfig)))


def test_every_row_is_shown_by_a_command() -> None:
    table = (ROOT / "docs" / "seeds.md").read_text().partition("## Names and features")[2]
    assert set(re.findall(r"^\| (.+?) \| ", table, re.MULTILINE)[1:]) <= SHOWN.keys()
    assert all(SHOWN.values())


@pytest.mark.stack
@pytest.mark.parametrize("command", dict.fromkeys(COMMANDS))
def test_the_command_is_there(command: str) -> None:
    words = shlex.split(command)
    variables = {}
    while VARIABLE.match(words[0]):
        name, _, value = words.pop(0).partition("=")
        variables[name] = value
    if words[0] == "forge-env":
        check_forge_env(words[1:], variables)
    elif words[:2] == ["python", "-c"]:
        exec(words[2], {})
    elif words[:2] == ["python", "-m"]:
        check_module(words[2], words[3:])
    elif words[0] == "sbatch":
        [script] = [word for word in words[1:] if not word.startswith("-")]
        assert "#SBATCH" in (ROOT / script).read_text()
    else:
        assert words[0] == "make"
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
