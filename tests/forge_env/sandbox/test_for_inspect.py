"""inspect_ai's own checks of a sandbox provider, on ours, with both engines."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

WHY = "NOT RUN: inspect_ai is not installed (`make conformance` makes an environment for it)"
inspect_ai = pytest.importorskip("inspect_ai", reason=WHY)

from inspect_ai.util._sandbox.environment import resolve_sandbox_environment  # noqa: E402
from inspect_ai.util._sandbox.registry import registry_find_sandboxenv  # noqa: E402
from inspect_ai.util._sandbox.self_check import *  # noqa: E402, F403

from forge_env.sandbox.for_inspect import LONGEST_S, ForgeSandboxConfig, ForgeSandboxEnvironment  # noqa: E402
from forge_env.sandbox.results import ExecResult  # noqa: E402
from forge_env.sandbox.spec import Limits  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]
NOT_OURS = {"test_exec_as_user": "a sandbox has one user, who is not root; the suite has providers mark such a check"}


@pytest_asyncio.fixture(
    scope="module", loop_scope="module", params=["local", pytest.param("docker", marks=pytest.mark.docker)]
)
async def spec(request: pytest.FixtureRequest) -> AsyncIterator[Any]:
    """What inspect_ai makes of `sandbox=("forge_env", ENGINE)`, in a task that runs."""
    spec = resolve_sandbox_environment(("forge_env", request.param))
    provider = registry_find_sandboxenv(spec.type)
    await provider.task_init("task", spec.config)
    yield spec
    await provider.task_cleanup("task", spec.config, cleanup=True)
    assert provider.engines == {}


@pytest_asyncio.fixture(loop_scope="module")
async def sandbox_env(spec: Any, request: pytest.FixtureRequest) -> AsyncIterator[object]:
    """The sandbox of a sample of that task."""
    if reason := NOT_OURS.get(request.node.originalname):
        request.node.add_marker(pytest.mark.xfail(reason=reason, strict=True))
    provider = registry_find_sandboxenv(spec.type)
    environments = await provider.sample_init("task", spec.config, {})
    yield environments["default"]
    await provider.sample_cleanup("task", spec.config, environments, interrupted=False)


async def test_a_task_names_it(tmp_path: Path) -> None:
    from inspect_ai import Task
    from inspect_ai.dataset import Sample
    from inspect_ai.scorer import match
    from inspect_ai.solver import Generate, Solver, TaskState, solver
    from inspect_ai.util import sandbox

    @solver
    def adder() -> Solver:
        async def solve(state: TaskState, generate: Generate) -> TaskState:
            done = await sandbox().exec(["python", "-c", state.input_text])
            state.output.completion = done.stdout
            return state

        return solve

    samples = [Sample(input="print(6 * 7)", target="42"), Sample(input="print(1 + 1)", target="2")]
    task = Task(dataset=samples, solver=adder(), scorer=match(), sandbox=("forge_env", "local"))
    [log] = await inspect_ai.eval_async(task, model="mockllm/model", log_dir=str(tmp_path))
    assert (log.status, log.results.scores[0].metrics["accuracy"].value) == ("success", 1.0), log.error


class Recorder:
    """A sandbox that only remembers its limits."""

    limits: Limits

    async def exec(self, command: list[str], *, limits: Limits, **_: Any) -> ExecResult:
        self.limits = limits
        return ExecResult(0, "", "")


async def test_a_timeout_is_one_of_the_clock_and_not_of_all_threads_together() -> None:
    box = Recorder()
    await ForgeSandboxEnvironment(box, ForgeSandboxConfig()).exec(["true"], timeout=2)
    assert (box.limits.wall_s, box.limits.cpu_s) == (2, LONGEST_S)
