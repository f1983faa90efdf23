"""A run with the real trackio, MLflow and W&B, each in a folder: what arrives, and that a resumed run continues it."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("trackio")

from forge_env.config import load_config
from forge_env.run import RunFolder
from forge_env.run.metrics import open_loggers
from forge_env.run.trackers import Tracker
from tests.forge_env.run.test_trackers import played


async def write_part(root: Path, override: str, step: int, exit: str) -> None:
    """Log a row and an episode to the run's folder, and close its loggers."""
    config = load_config("coding_rlvr", [override, "logging.tensorboard=false"])
    folder = RunFolder(root / "runs" / "tracked")
    folder.create()
    for logger in open_loggers(config, folder, lambda: 0.0)[1:]:
        assert isinstance(logger, Tracker)
        logger.log(step, {"reward/mean": step / 2, "odd,name": 1.0, "missing": float("nan")})
        logger.log_episodes(step, "eval", await played())
        logger.close(exit)
    folder.release()


async def write_twice(root: Path, override: str, exit: str = "success") -> None:
    """Write two parts of a run: one that failed, and its continuation."""
    await write_part(root, override, 1, "failed")
    await write_part(root, override, 2, exit)


@pytest.fixture
def apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


async def test_trackio_has_both_rows_and_traces_in_one_run(apart: Path) -> None:
    program = f"""
import asyncio, os
os.environ["TRACKIO_DIR"] = {str(apart / "trackio")!r}
from pathlib import Path
from tests.forge_env.run.test_real_trackers import write_twice
asyncio.run(write_twice(Path({str(apart)!r}), "logging.loggers=[trackio]"))
from trackio.sqlite_storage import SQLiteStorage
[name] = SQLiteStorage.get_runs("forge-env")
print("run", name)
rows = SQLiteStorage.get_logs("forge-env", name)
print("rewards", [row["reward/mean"] for row in rows if "reward/mean" in row])
traces = SQLiteStorage.get_traces("forge-env", name)
print("traces", len(traces))
"""
    printed = run_apart(program)
    assert "run tracked-" in printed
    assert "rewards [0.5, 1.0]" in printed
    assert "traces 2" in printed


@pytest.mark.parametrize(("exit", "status"), [("success", "FINISHED"), ("failed", "FAILED")])
async def test_mlflow_has_both_rows_and_traces_in_one_run(apart: Path, exit: str, status: str) -> None:
    program = f"""
import asyncio, os
os.environ |= {{"MLFLOW_TRACKING_URI": {(apart / "mlflow").as_uri()!r}, "MLFLOW_ALLOW_FILE_STORE": "true"}}
from pathlib import Path
from tests.forge_env.run.test_real_trackers import write_twice
asyncio.run(write_twice(Path({str(apart)!r}), "logging.loggers=[mlflow]", {exit!r}))
import mlflow
client = mlflow.MlflowClient()
experiment = client.get_experiment_by_name("forge-env").experiment_id
[run] = client.search_runs([experiment])
print("run", run.info.run_name, run.info.status)
print("rewards", [metric.value for metric in client.get_metric_history(run.info.run_id, "reward/mean")])
traces = mlflow.search_traces(locations=[experiment], return_type="list")
print("spans", sorted(len(trace.data.spans) for trace in traces))
"""
    printed = run_apart(program)
    assert f"run tracked {status}" in printed
    assert "rewards [0.5, 1.0]" in printed
    assert "spans [2, 2]" in printed


async def test_wandb_keeps_one_run_with_its_table(apart: Path) -> None:
    # W&B names an offline part after the second in which it starts; process start-up keeps the two apart
    for step, exit in ((1, "failed"), (2, "success")):
        program = f"""
import asyncio, os
os.environ |= {{"WANDB_MODE": "offline", "WANDB_SILENT": "true"}}
from pathlib import Path
from tests.forge_env.run.test_real_trackers import write_part
asyncio.run(write_part(Path({str(apart)!r}), "logging.wandb=true", {step}, {exit!r}))
"""
        run_apart(program)
    identifier = (apart / "runs" / "tracked" / ".wandb_id").read_text()
    written = list((apart / "runs" / "tracked").glob(f"wandb/offline-run-*{identifier}"))
    assert len(written) == 2, "both parts belong to one run"
    assert list(written[0].glob("files/media/table/episodes/*.json"))


def run_apart(program: str) -> str:
    """Run a program in a process of its own, since each tracker has global state; returns what it printed."""
    import subprocess
    import sys

    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


ROOT = Path(__file__).parents[3]
