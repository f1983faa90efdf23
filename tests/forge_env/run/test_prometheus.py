"""The newest metrics of a run for Prometheus."""

from __future__ import annotations

import math
from pathlib import Path

import httpx2
import pytest

from forge_env.config import load_config
from forge_env.errors import UsageError
from forge_env.run import RunFolder
from forge_env.run.metrics import check_loggers, open_loggers
from forge_env.run.prometheus import ADDRESS, PrometheusLogger, address

pytest.importorskip("prometheus_client", reason="NOT RUN: pip install prometheus-client")


def figures(port: int) -> dict[str, float]:
    """The samples of the page by their name with labels."""
    text = httpx2.get(f"http://127.0.0.1:{port}/metrics", trust_env=False).text
    lines = [line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("forge_env")]
    return {name: float(value) for name, value in lines}


def test_the_newest_values_are_served_while_the_run_lasts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ADDRESS, "127.0.0.1:0")
    config = load_config("coding_rlvr", ["logging.loggers=[prometheus]"])
    check_loggers(config)
    folder = RunFolder(tmp_path / "run-1")
    folder.create()
    *others, logger = open_loggers(config, folder, clock=lambda: 0.0)
    assert isinstance(logger, PrometheusLogger)
    assert figures(logger.port) == {}
    logger.log(1, {"reward/mean": 0.25, "eval/eval/score": 0.5})
    logger.log(2, {"reward/mean": 0.75, "reward-mean": 1.0, "mismatch/max": math.nan})
    served = figures(logger.port)
    assert math.isnan(served.pop('forge_env_mismatch_max{metric="mismatch/max",run="run-1"}'))
    assert served == {
        'forge_env_reward_mean{metric="reward/mean",run="run-1"}': 0.75,
        'forge_env_reward_mean{metric="reward-mean",run="run-1"}': 1.0,
        'forge_env_eval_eval_score{metric="eval/eval/score",run="run-1"}': 0.5,
        'forge_env_step{metric="step",run="run-1"}': 2.0,
    }
    monkeypatch.setenv(ADDRESS, f"127.0.0.1:{logger.port}")
    with pytest.raises(UsageError, match=r"can't serve metrics at .*in use") as caught:
        open_loggers(config, folder, clock=lambda: 0.0)
    assert ADDRESS in str(caught.value.fix)
    for each in (*others, logger):
        each.close()
    with pytest.raises(httpx2.ConnectError):
        figures(logger.port)


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ("", ("127.0.0.1", 9464)),
        ("9000", ("127.0.0.1", 9000)),
        ("0.0.0.0:9000", ("0.0.0.0", 9000)),
        ("[::1]:0", ("::1", 0)),
    ],
)
def test_the_address_is_set_by_a_variable(monkeypatch: pytest.MonkeyPatch, given: str, read: tuple[str, int]) -> None:
    monkeypatch.setenv(ADDRESS, given)
    assert address() == read


@pytest.mark.parametrize("given", ["host", "host:", "host:99999", "host:-1"])
def test_what_is_no_address_is_refused(monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    monkeypatch.setenv(ADDRESS, given)
    with pytest.raises(UsageError, match=r"FORGE_ENV_METRICS=.* is not an address"):
        PrometheusLogger.check()
