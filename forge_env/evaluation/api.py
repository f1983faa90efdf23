"""Python interface to evaluations.

result = fe.evaluate("coding_rlvr", "qwen3-8b", base_url="http://localhost:8000/v1", num_tasks=100, epochs=4)
print(result.summary.environments["coding_rlvr"].score)
frame = result.to_frame()
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from forge_env.config.evaluation import EnvironmentChoice, EvaluationConfig
from forge_env.config.reader import Source, build
from forge_env.environment.base import Environment
from forge_env.errors import UsageError
from forge_env.evaluation.evaluation import Evaluation
from forge_env.evaluation.record import EvaluationResult
from forge_env.evaluation.tables import exceptions, headline
from forge_env.policy import Policy
from forge_env.rollout.scripted import FunctionPolicy
from forge_env.visible import one_line

if TYPE_CHECKING:
    from forge_env.sandbox.protocol import SandboxEngine


log = logging.getLogger(__name__)
EnvironmentLike = str | type[Environment] | EnvironmentChoice | dict[str, Any]


def evaluate(
    environments: EnvironmentLike | Sequence[EnvironmentLike],
    model: str | Policy | Callable[..., Any],
    *,
    resume: bool = False,
    show: bool = False,
    sandboxes: SandboxEngine | None = None,
    **settings: Any,
) -> EvaluationResult:
    """Evaluate a model or policy. If an event loop is running already (a notebook), it runs in a separate thread.

    Ctrl-C abandons unfinished samples; finished ones are in the folder.

    Args:
        environments: names, classes, or `EnvironmentChoice`s.
        model: a model served by an endpoint, `vllm:PATH`, a scripted policy (`gold`, `random`, `module:function`), a
            function `(messages, tools) -> str | Message`, sync or async, or any policy.
        resume: continue the evaluation in the folder `out`: play missing samples and those lost to infrastructure.
        show: draw progress on stderr.
        sandboxes: a started engine to use; else one is started when first needed.
        settings: keys of `EvaluationConfig`.

    Raises:
        UsageError: the request is invalid; nothing was started.
        EndpointError: the endpoint doesn't answer.

    Examples:
        >>> import tempfile
        >>> import forge_env as fe
        >>> result = fe.evaluate("calculator", "gold", num_tasks=3, out=tempfile.mkdtemp())
        >>> result.summary.environments["calculator"].score.value
        1.0
    """
    job = partial(evaluate_async, environments, model, resume=resume, show=show, sandboxes=sandboxes, **settings)
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(job())
    return _in_a_thread(job)


async def evaluate_async(
    environments: EnvironmentLike | Sequence[EnvironmentLike],
    model: str | Policy | Callable[..., Any],
    *,
    resume: bool = False,
    show: bool = False,
    sandboxes: SandboxEngine | None = None,
    **settings: Any,
) -> EvaluationResult:
    """`evaluate` as a coroutine.

    Args:
        environments: as for `evaluate`.
        model: as for `evaluate`.
        resume: as for `evaluate`.
        show: as for `evaluate`.
        sandboxes: as for `evaluate`.
        settings: keys of `EvaluationConfig`.

    Raises:
        UsageError: the request is invalid; nothing was started.
        EndpointError: the endpoint doesn't answer.

    Examples:
        >>> import asyncio, tempfile
        >>> import forge_env as fe
        >>> run = fe.evaluate_async("calculator", lambda messages, tools: "42", num_tasks=2, out=tempfile.mkdtemp())
        >>> asyncio.run(run).summary.environments["calculator"].score.value
        0.0
    """
    single = isinstance(environments, str | type | EnvironmentChoice | dict) or not isinstance(environments, Iterable)
    given: list[Any] = [environments] if single else list(environments)  # type: ignore[arg-type]
    classes = {_path(cls): cls for cls in given if isinstance(cls, type)}
    chosen = [{"name": _path(item)} if isinstance(item, type) else item for item in given]
    name, policy = _named_policy(model)
    config = build(EvaluationConfig, Source("", {"environments": chosen, "model": name, **settings}))
    evaluation = Evaluation(
        config, policy=policy, classes=classes, resume=resume, sandboxes=sandboxes, stream=sys.stderr if show else None
    )
    result = await evaluation.run()
    for item in result.summary.environments.values():
        if exceptions(asdict(item)):
            first = f"; the first bug: {one_line(item.first_bug, 300)}" if item.first_bug else ""
            log.warning("%s%s", headline(item, result.summary.score_name), first)
    return result


def _named_policy(model: Any) -> tuple[str, Policy | None]:
    """The model's name for the record, and its policy if `model` is not just a name."""
    if isinstance(model, str):
        return model, None
    if isinstance(model, type):
        raise UsageError(f"{model.__name__} is a class, not a policy", fix=f"give an object: {model.__name__}(...)")
    if isinstance(model, Policy):
        return (model.name if isinstance(model.name, str) and model.name else type(model).__name__), model
    if callable(model):
        named = hasattr(model, "__qualname__") and hasattr(model, "__module__")
        return (_path(model) if named else type(model).__name__), FunctionPolicy(model)
    raise UsageError(
        f"{str(model)[:80]!r} is not a model",
        fix="give an endpoint's model, vllm:PATH, gold, random, a function (messages, tools) -> str, or an object of a "
        "class derived from forge_env.policy.Policy",
    )


def _path(found: Any) -> str:
    """`module:name` of a class or function for other processes; the bare name if it can't be imported there."""
    importable = found.__module__ != "__main__" and "<" not in found.__qualname__
    return f"{found.__module__}:{found.__qualname__}" if importable else str(found.__name__)


def _in_a_thread(job: Callable[[], Coroutine[Any, Any, EvaluationResult]]) -> EvaluationResult:
    """Run `job` in an event loop of another thread. Ctrl-C cancels the job and waits until it has ended.

    Ctrl-C may arrive at any moment, even while the thread starts.
    """
    runner, ended = asyncio.Runner(loop_factory=asyncio.new_event_loop), threading.Event()
    loop = runner.get_loop()

    async def attended() -> EvaluationResult:
        await asyncio.sleep(0)  # if cancelled before the thread started, the task ends here
        return await job()

    playing = loop.create_task(attended())

    def work() -> None:
        try:
            with suppress(KeyboardInterrupt, SystemExit), runner:  # these exceptions of a task leave the loop at once;
                loop.run_until_complete(asyncio.wait([playing]))  # `playing.result()` raises them in the caller
        finally:
            ended.set()

    thread = threading.Thread(target=work, name="forge-env-evaluate")
    try:
        thread.start()
        ended.wait()  # not `join`: in Python 3.11 an interrupted `join` considers the thread finished
    except KeyboardInterrupt:
        with suppress(RuntimeError):  # the loop has been closed in the meantime
            loop.call_soon_threadsafe(playing.cancel)
        if thread.ident is not None:
            ended.wait()
        raise
    thread.join()
    return playing.result()
