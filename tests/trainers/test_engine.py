"""`AsyncEngine` around an engine that fails; with the real vLLM it is tested in `test_stack.py`."""

from __future__ import annotations

import asyncio
import sys
import threading
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from trainers.generator.engine import AsyncEngine
from trainers.generator.types import EngineFailedError, SamplingOptions


class Failing:
    """vLLM's engine, whose first step fails when it is told to."""

    def __init__(self) -> None:
        self.requests: list[str] = []
        self.stepping = threading.Event()
        self.fail = threading.Event()
        self.output_processor = SimpleNamespace(request_states={})

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    def add_request(self, request_id: str, prompt: dict[str, Any], *_: Any, **__: Any) -> None:
        if len(prompt["prompt_token_ids"]) > 4:
            raise ValueError("longer than the context")
        self.requests.append(request_id)

    def abort_request(self, request_ids: list[str]) -> None:
        self.requests = [request for request in self.requests if request not in request_ids]

    def set_weight_version(self, version: str) -> None: ...

    def step(self) -> list[Any]:
        if not self.requests:
            return []
        self.stepping.set()
        self.fail.wait()
        raise RuntimeError("out of memory")


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Failing:
    engine = Failing()
    vllm: Any = ModuleType("vllm")
    vllm.EngineArgs = vllm.SamplingParams = lambda **options: options
    vllm.LLMEngine = SimpleNamespace(from_engine_args=lambda _: engine)
    parameters: Any = ModuleType("vllm.sampling_params")
    parameters.RequestOutputKind = SimpleNamespace(FINAL_ONLY=2)
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", parameters)
    return engine


async def test_an_engine_that_fails_answers_all_who_asked_and_all_who_ask_later(failing: Failing) -> None:
    engine = AsyncEngine({})
    calls = [asyncio.ensure_future(engine.generate([1], SamplingOptions()))]
    await asyncio.to_thread(failing.stepping.wait)
    # these wait for the step to end
    calls += [asyncio.ensure_future(engine.generate([2], SamplingOptions())) for _ in range(5)]
    await asyncio.sleep(0)
    failing.fail.set()
    errors = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(error) for error in errors] == [EngineFailedError] * 6
    assert engine.in_flight == 0
    with pytest.raises(EngineFailedError, match="out of memory"):
        await engine.generate([3], SamplingOptions())
    await engine.close()


async def test_a_request_that_the_engine_refuses_is_its_caller_s_alone(failing: Failing) -> None:
    engine = AsyncEngine({})
    with pytest.raises(ValueError, match="longer than the context"):
        await engine.generate([1] * 5, SamplingOptions())
    accepted = asyncio.ensure_future(engine.generate([1], SamplingOptions()))
    await asyncio.to_thread(failing.stepping.wait)
    assert engine.in_flight == 1
    failing.fail.set()
    with pytest.raises(EngineFailedError):
        await accepted
    await engine.close()


async def test_a_request_ended_before_the_engine_has_seen_it_leaves_nothing_there(failing: Failing) -> None:
    engine = AsyncEngine({})
    call = asyncio.ensure_future(engine.generate([1], SamplingOptions(), "mine"))
    await asyncio.sleep(0)
    await engine.abort("mine")
    completion = await call
    assert (completion.stop_reason, completion.token_ids) == ("abort", [])
    assert engine.in_flight == 0
    with pytest.raises(ValueError, match="longer"):  # a step has been taken, and the orders before it carried out
        await engine.generate([1] * 5, SamplingOptions())
    assert failing.requests == []
    await engine.close()
