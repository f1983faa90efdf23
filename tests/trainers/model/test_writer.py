"""Folders that several processes write at once: transformers' own reader gets the tensors back."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch
from safetensors import safe_open
from safetensors.torch import load_file

from trainers.model import writer
from trainers.model.folder import INDEX
from trainers.model.parts import Part
from trainers.model.writer import read_companions, write_model

pytestmark = pytest.mark.stack


@pytest.fixture
def like(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"dtype": "float32", "hidden_size": 6}))
    (tmp_path / "tokenizer.json").write_text("{}")
    return tmp_path


def tensor(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def boxes(name: str, whole: torch.Tensor, *cuts: tuple[int, list[int]]) -> list[Part]:
    """A tensor in boxes, cut along each of these dimensions."""
    parts = [Part.all_of({name: whole})[0]]
    for dim, sizes in cuts:
        cut = []
        for part in parts:
            first = 0
            for piece in torch.split(part.tensor, sizes, dim):
                start = tuple(place + first * (at == dim) for at, place in enumerate(part.start))
                cut.append(Part(name, start, part.whole, piece))
                first += piece.shape[dim]
        parts = cut
    return parts


def test_boxes_of_every_kind_become_whole_tensors(like: Path, tmp_path: Path) -> None:
    state = {name: tensor(5, 4, 6) for name in ("rows", "columns", "blocks", "whole")} | {"vector": tensor(7)}
    rows = torch.tensor([3, 0, 4])
    parts = [
        *boxes("rows", state["rows"], (0, [2, 3])),
        *boxes("columns", state["columns"], (2, [1, 5])),
        *boxes("blocks", state["blocks"], (0, [4, 1]), (1, [3, 1])),
        *boxes("whole", state["whole"]),
        *boxes("vector", state["vector"], (0, [3, 4])),
        Part("other order", (2, 0, 0), (5, 4, 6), state["rows"], rows),
        Part("other order", (0, 0, 0), (5, 4, 6), state["rows"][:2]),
    ]
    write_model(parts, read_companions(like), tmp_path / "out", dtype=torch.float32)
    assert {file.name for file in (tmp_path / "out").iterdir()} == {
        *("config.json", "tokenizer.json", "model.safetensors")
    }
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(found.pop("other order"), torch.cat([state["rows"][:2], state["rows"][rows]]))
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], whole) for name, whole in state.items())


def test_large_models_have_files_and_an_index(like: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "LARGEST", 200)
    state = {f"layer.{number}": tensor(5, 8) for number in range(5)}
    write_model(Part.all_of(state), read_companions(like), tmp_path / "out", dtype=torch.bfloat16)
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    assert index["metadata"]["total_size"] == 5 * 80
    assert sorted(set(index["weight_map"].values())) == [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
    for name, file in index["weight_map"].items():
        with safe_open(tmp_path / "out" / file, framework="pt") as opened:
            assert torch.equal(opened.get_tensor(name), state[name].bfloat16())
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


def test_parts_that_overlap_are_refused(like: Path, tmp_path: Path) -> None:
    first, _ = boxes("half", tensor(4, 2), (0, [2, 2]))
    with pytest.raises(RuntimeError, match="could not write its shards: ValueError"):
        write_model([first, first], read_companions(like), tmp_path / "out", dtype=torch.float32)
    assert not (tmp_path / "out").exists()


def test_trained_models_keep_every_chat_template(like: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(like, folder)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    (folder / "special_tokens_map.json").write_text('{"bos_token": "<s>"}')
    (folder / "chat_template.json").write_text('{"chat_template": "of a processor"}')
    write_model(Part.all_of({"a": tensor(2)}), read_companions(folder), tmp_path / "out", dtype=torch.float32)
    names = ("additional_chat_templates/tool_use.jinja", "chat_template.jinja", "special_tokens_map.json")
    written = [(tmp_path / "out" / name).read_text() for name in names]
    assert written == ["tools", "of a processor", '{"bos_token": "<s>"}']
