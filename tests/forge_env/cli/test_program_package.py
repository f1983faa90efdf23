"""What `forge-env new --kind program` writes, with every command that takes an environment."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from forge_env.cli.main import main
from forge_env.config.serving import ServeLimits
from tests.forge_env.serve.serving import running
from tests.sandboxes.conftest import require

NAME = "my_program:MyProgram"
pytestmark = pytest.mark.slow


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    require("local")
    assert main(["new", "my_program", "--kind", "program", "--dir", str(tmp_path)]) == 0
    monkeypatch.syspath_prepend(tmp_path / "my_program" / "src")
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] == "my_program"]:
        del sys.modules[name]


def test_person_as_model(package: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (package / "typed").write_text("Seven, I think.\n\n7\n\n")
    monkeypatch.setattr("sys.stdin", (package / "typed").open())
    assert main(["play", NAME, "--sandbox", "local"]) == 0
    shown = capsys.readouterr().out
    assert "How many letters has the word 'sandbox'?" in shown
    assert "Answer with the number alone." in shown, "the program has asked again"
    assert "ended: reward 1" in shown


def test_it_is_validated_and_evaluated(package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", NAME, "--num-tasks", "1", "--sandbox", "local"]) == 0
    end = f"{NAME}: no check failed; not checked: the agent is shown no hidden data\n"  # its answers are short
    assert capsys.readouterr().out.endswith(end)
    assert main(["eval", NAME, "--model", "gold", "-n", "1", "--sandbox", "local", "--out", "gold"]) == 0
    assert "1.000" in capsys.readouterr().out


@pytest.mark.usefixtures("package")
async def test_its_model_is_played_by_clients_of_the_server() -> None:
    """Each answer is the program's: the next request, or its end."""
    pytest.importorskip("uvicorn", reason='NOT RUN: pip install "forge-env[openenv]"')
    from forge_env.serve.openenv import app_of

    app = app_of(NAME, sandbox="local", limits=ServeLimits())
    async with running(app) as port:
        url = f"http://127.0.0.1:{port}"
        async with httpx2.AsyncClient(base_url=url, trust_env=False, timeout=60.0) as client:

            async def post(path: str, **body: Any) -> Any:
                answer = await client.post(path, json=body)
                assert answer.status_code == 200, answer.text
                return answer.json()

            for _ in range(2):
                begun = await post("/reset", seed=0)
                assert "'sandbox'" in begun["observation"]["messages"][-1]["content"]
                again = await post("/step", action={"message": "Seven, I think."})
                assert (again["reward"], again["done"]) == (0.0, False)
                ended = await post("/step", action={"message": "7"})
                assert (ended["reward"], ended["done"]) == (1.0, True)
