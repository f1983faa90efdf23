"""What the ranks of a trainer read, publish and write, each its own shards, is bit for bit what one rank has whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from forge_env.errors import ForgeError
from tests.trainers.model.checkpoints import CHECKPOINTS, write_checkpoint
from tests.trainers.titan.ranks import FORKING, FSDP, TENSOR, offer, published, run_ranks
from trainers.titan.device import use_device
from trainers.titan.model import TitanModel
from trainers.titan.shards import place_of
from trainers.weights import shared
from trainers.weights.flat import Flat, Layout
from trainers.weights.reader import Reader
from trainers.weights.transport import Sender

pytestmark = [pytest.mark.stack, pytest.mark.slow, pytest.mark.timeout(300)]
UNEVEN: dict[str, Any] = {"vocab_size": 323, "hidden_size": 70, "intermediate_size": 90, "num_attention_heads": 5}
UNEVEN["num_key_value_heads"] = 1
UNDIVIDED = ("Qwen 3 MoE", "Qwen 3.5", "Qwen 3.5 MoE", "Gemma 4", "Gemma 4, values")
UNDIVIDED += ("Gemma 4 E2B", "Gemma 4 MoE")
UNDIVIDED += ("Phi 4 mini", "Phi 4 mini, short", "gpt-oss", "uneven")
"""Models without tensor parallelism: their family has none, or they have one head of keys and values."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    names = CHECKPOINTS.keys() - {"Mistral", "Qwen 3, YaRN"}  # which have the tensors of others
    found = {name: write_checkpoint(name, root / name) for name in sorted(names)}
    # heads and rows that no number of ranks divides
    return found | {"uneven": write_checkpoint("Llama 3.1", root / "uneven", **UNEVEN)}


def sharded(folders: dict[str, Path], *ways: str) -> dict[str, Path]:
    """The folders for each way to shard a model that it allows."""
    return {
        f"{way}:{name}": folder
        for way in ways
        for name, folder in folders.items()
        if way == "fsdp" or (name not in UNDIVIDED and (way == "tensor" or name == "Qwen 3"))
    }


def test_one_rank_publishes_all_there_is(folders: dict[str, Path]) -> None:
    for folder in folders.values():
        model = TitanModel(folder, max_length=128, device=use_device(with_gpus=False).torch)
        parts, whole = model.published(), model.state_dict_hf()
        layout = Layout.of(parts)
        found = dict(Flat([layout], [layout.pack(parts)]))
        assert found.keys() == whole.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in whole.items())


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_publish_shards_that_make_the_whole(folders: dict[str, Path], tmp_path: Path, size: int) -> None:
    asked = sharded(folders, "fsdp", "tensor", *["context"] * (size == 2))
    seen = run_ranks(size, asked, tmp_path, published)
    assert seen.keys() == asked.keys()
    for name, (different, sizes, total) in seen.items():
        assert not different, name
        assert sum(sizes) == total, "nothing is published twice"
        assert max(sizes) < 1.2 * total / size, "nobody has much more than its share"


@pytest.mark.parametrize("dims", [FSDP, TENSOR], ids=["fsdp", "tensor"])
async def test_another_host_fetches_from_every_rank_what_makes_the_whole(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dims: dict[str, int]
) -> None:
    folder = folders["Llama 3.1"]  # whose heads are in another order there
    whole = TitanModel(folder, max_length=128, device=use_device(with_gpus=False).torch).state_dict_hf()
    monkeypatch.setattr(shared, "host", lambda: "the generator's")
    generator, trainer = Reader(), Sender()
    pipes = [FORKING.Pipe() for _ in range(2)]
    processes = [
        FORKING.Process(target=offer, args=(rank, 2, folder, dims, tmp_path / "meet", theirs), daemon=True)
        for rank, (_, theirs) in enumerate(pipes)
    ]
    for process in processes:
        process.start()
    for version in (1, 2, 3):
        for mine, _ in pipes:
            mine.send(True)
        published = trainer.publish([mine.recv() for mine, _ in pipes])
        sources = [handle.process.source for handles in published.handles for handle in handles.values()]
        assert {each and each.address.host for each in sources} == {"127.0.0.2", "127.0.0.3"}
        found = dict(await generator.take(published))
        assert found.keys() == whole.keys()
        assert all(torch.equal(found[name], tensor * 2.0**version) for name, tensor in whole.items())
    for mine, _ in pipes:
        mine.send(False)
    for process in processes:
        process.join()
        assert process.exitcode == 0


def test_what_an_adapter_does_besides_moving_rows_is_refused() -> None:
    class Transposing:
        def to_hf(self, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            return {name: tensor.T for name, tensor in state.items()}

    with pytest.raises(ForgeError, match="can't be published"):
        place_of(Transposing(), "layers.0.weight", (3, 4))
