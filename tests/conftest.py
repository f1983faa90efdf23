"""What every test shares: which tests this machine can run, said loudly when it can't."""

from __future__ import annotations

import os
from functools import cache

import pytest
from hypothesis import settings

from forge_env import machine
from sandboxes.docker import DockerEngine

settings.register_profile("forge_env", deadline=None)  # a busy machine is no failure
settings.load_profile("forge_env")

IN_CI = os.environ.get("CI", "").lower() in ("1", "true")


@cache
def docker_reason() -> str:
    """Why tests marked `docker` can't run here, or an empty string."""
    return DockerEngine.unavailable_reason() or ""


@cache
def stack_reason() -> str:
    """Why tests marked `stack` can't run here, or an empty string."""
    missing = machine.missing_training_packages()
    return f"training packages missing: {', '.join(missing)}" if missing else ""


NEEDS = {"docker": docker_reason, "stack": stack_reason}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what can't run here; in CI refuse to run at all instead."""
    not_run: dict[str, int] = {}
    for item in items:
        for marker, reason in NEEDS.items():
            if item.get_closest_marker(marker) and reason():
                item.add_marker(pytest.mark.skip(reason=f"NOT RUN: {reason()}"))
                not_run[reason()] = not_run.get(reason(), 0) + 1
    if not_run and IN_CI:
        pytest.exit("CI runs every test: " + "; ".join(not_run), returncode=1)
    config.stash[NOT_RUN] = not_run


NOT_RUN = pytest.StashKey[dict[str, int]]()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say what was not run, so that a green line can't be mistaken."""
    for reason, count in config.stash.get(NOT_RUN, {}).items():
        terminalreporter.write_sep("!", f"{count} tests NOT RUN: {reason}", red=True, bold=True)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """In CI a skipped test is a failure, whatever it was skipped for."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if IN_CI and reporter is not None and reporter.stats.get("skipped") and session.exitstatus == 0:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture
def clean_environ(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """No forge-env setting of the person running the tests reaches the test."""
    for name in [name for name in os.environ if name.startswith("FORGE_ENV_")]:
        monkeypatch.delenv(name)
    return monkeypatch
