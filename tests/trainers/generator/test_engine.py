"""`InProcessEngine` around an engine that fails; with the real vLLM it is tested in `test_stack.py`."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import AsyncIterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from forge_env.errors import GeneratorError, UsageError
from trainers.generator.async_llm import AsyncLLMEngine
from trainers.generator.engine import InProcessEngine, load_into
from trainers.generator.types import Completion, EngineFailedError, SamplingOptions, WeightsDroppedError


class RefusedError(Exception):
    """Stands for vLLM's `VLLMClientError`, which is not a `ValueError`."""


class Fake:
    """vLLM's engine: every request waits until it is told to `go_on`, and then ends with one token, or fails."""

    def __init__(self) -> None:
        self.requests: dict[str, str] = {}
        """Salt by name."""
        self.admitted: list[tuple[str, str]] = []
        self.stepping = threading.Event()
        self.go_on = threading.Event()
        self.failure: str | None = None
        self.loading: str | None = None
        self.unreadable = False
        self.rests: list[tuple[Any, ...]] = []
        self.output_processor = SimpleNamespace(request_states={})
        self.model_config = SimpleNamespace(get_num_experts=lambda: 0, model="folder")
        self.vllm_config = SimpleNamespace(device_config=SimpleNamespace(device="cpu"))

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    def add_request(self, request_id: str, prompt: dict[str, Any], *_: Any, **__: Any) -> None:
        if len(prompt["prompt_token_ids"]) > 4:
            raise RefusedError("longer than the context")
        self.requests[request_id] = prompt["cache_salt"]
        self.admitted.append((request_id, prompt["cache_salt"]))

    def abort_request(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self.requests.pop(request_id, None)

    def set_weight_version(self, version: str) -> None: ...

    def apply_model(self, load: Any) -> None:
        if self.loading:
            raise RuntimeError(self.loading)

    def sleep(self, level: int, mode: str) -> None:
        if self.failure:
            raise RuntimeError(self.failure)
        self.rests.append(("asleep", level, mode))

    def wake_up(self) -> None:
        self.rests.append(("awake",))

    def step(self) -> list[Any]:
        if not self.requests:
            return []
        self.stepping.set()
        self.go_on.wait()
        if self.failure:
            raise RuntimeError(self.failure)
        ended, self.requests = self.requests, {}
        logprobs = None if self.unreadable else SimpleNamespace(logprobs=[-1.0])
        sampled = SimpleNamespace(token_ids=[7], logprobs=logprobs, weight_versions=None, finish_reason="stop")
        return [SimpleNamespace(request_id=name, outputs=[sampled]) for name in ended]


def sampling_params(**options: Any) -> dict[str, Any]:
    if options["temperature"] > 2:
        raise RefusedError("temperature must be in [0, 2]")
    return options


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    engine = Fake()
    vllm: Any = ModuleType("vllm")
    vllm.EngineArgs, vllm.SamplingParams = dict, sampling_params
    vllm.LLMEngine = SimpleNamespace(from_engine_args=lambda _: engine)
    parameters: Any = ModuleType("vllm.sampling_params")
    parameters.RequestOutputKind = SimpleNamespace(FINAL_ONLY=2)
    exceptions: Any = ModuleType("vllm.exceptions")
    exceptions.VLLMClientError = RefusedError
    for module in (vllm, parameters, exceptions):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return engine


@pytest.fixture
async def engine(fake: Fake) -> AsyncIterator[InProcessEngine]:
    engine = InProcessEngine({})
    yield engine
    await engine.close()


def ask(engine: InProcessEngine, *names: str) -> list[asyncio.Future[Completion]]:
    return [asyncio.ensure_future(engine.generate([1], SamplingOptions(), name)) for name in names]


async def load_during_a_step(
    fake: Fake, engine: InProcessEngine, under_way: str, left: str
) -> tuple[asyncio.Future[float], list[asyncio.Future[Completion]]]:
    """New weights wait for the end of a step, and behind it a request that came before them."""
    calls = ask(engine, under_way)
    await asyncio.to_thread(fake.stepping.wait)
    calls += ask(engine, left)
    loading = asyncio.ensure_future(engine.load_weights(list, 1))
    await asyncio.sleep(0)
    fake.go_on.set()
    return loading, calls


async def test_failed_engine_answers_all_requests(fake: Fake, engine: InProcessEngine) -> None:
    fake.failure = "out of memory"
    calls = ask(engine, "first")
    await asyncio.to_thread(fake.stepping.wait)
    calls += ask(engine, *"abcde")  # these wait for the step to end
    await asyncio.sleep(0)
    fake.go_on.set()
    errors = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(error) for error in errors] == [EngineFailedError] * 6
    assert engine.in_flight == 0
    with pytest.raises(EngineFailedError, match="out of memory"):
        await engine.generate([3], SamplingOptions())


@pytest.mark.parametrize(
    ("prompt", "options", "reason"),
    [([1] * 5, SamplingOptions(), "longer than"), ([1], SamplingOptions(temperature=3.0), "temperature must be")],
)
async def test_a_request_that_the_engine_refuses_is_its_caller_s_alone(
    fake: Fake, engine: InProcessEngine, prompt: list[int], options: SamplingOptions, reason: str
) -> None:
    (accepted,) = ask(engine, "accepted")
    await asyncio.to_thread(fake.stepping.wait)
    refused = asyncio.ensure_future(engine.generate(prompt, options))
    await asyncio.sleep(0)
    fake.go_on.set()
    with pytest.raises(RefusedError, match=reason):
        await refused
    assert (await accepted).token_ids == [7]
    assert engine.in_flight == 0


async def test_request_ended_before_the_engine_saw_it(fake: Fake, engine: InProcessEngine) -> None:
    (call,) = ask(engine, "mine")
    await asyncio.sleep(0)
    await engine.abort("mine")
    completion = await call
    assert (completion.stop_reason, completion.token_ids.tolist()) == ("abort", [])
    assert engine.in_flight == 0
    fake.go_on.set()
    await asyncio.gather(*ask(engine, "later"))  # a step has been taken, and the orders before it carried out
    assert fake.requests == {}


async def test_requests_before_new_weights_never_meet_old_ones(fake: Fake, engine: InProcessEngine) -> None:
    loading, calls = await load_during_a_step(fake, engine, "old", "new")
    await asyncio.gather(loading, *calls)
    assert fake.admitted == [("old", "v0.1"), ("new", "v1.2")]


async def test_weights_that_fail_to_load_end_the_engine(fake: Fake, engine: InProcessEngine) -> None:
    fake.loading = "no such tensor"
    loading, calls = await load_during_a_step(fake, engine, "under way", "left")
    with pytest.raises(RuntimeError, match="no such tensor"):
        await loading
    first, second = await asyncio.gather(*calls, return_exceptions=True)
    assert isinstance(first, Completion)  # it ended in the step before
    assert isinstance(second, EngineFailedError)
    with pytest.raises(EngineFailedError, match="no such tensor"):
        await engine.generate([1], SamplingOptions())


async def test_asleep_it_takes_no_step_and_requests_wait(fake: Fake, engine: InProcessEngine) -> None:
    (under_way,) = ask(engine, "under way")
    await asyncio.to_thread(fake.stepping.wait)
    falling_asleep = asyncio.ensure_future(engine.sleep())
    await asyncio.sleep(0)
    assert not fake.rests, "a step is under way"
    fake.go_on.set()
    await asyncio.gather(under_way, falling_asleep)
    first, second = ask(engine, "first", "second")
    await asyncio.sleep(0)
    await engine.abort("second")
    assert (await second).stop_reason == "abort"
    await asyncio.wrap_future(engine._thread.submit(int))  # whatever was to be done there is done
    assert [name for name, _ in fake.admitted] == ["under way"]
    assert not first.done()
    assert fake.rests == [("asleep", 1, "keep")]
    await engine.wake()
    assert (await first).token_ids == [7]
    assert fake.rests[1:] == [("awake",)]
    assert engine.account.seconds()["wait for the trainer"] > 0


async def test_an_engine_that_can_not_sleep_answers_all_who_asked(fake: Fake, engine: InProcessEngine) -> None:
    calls = ask(engine, "a")
    await asyncio.to_thread(fake.stepping.wait)
    calls += ask(engine, "b")
    falling_asleep = asyncio.ensure_future(engine.sleep())
    await asyncio.sleep(0)
    fake.failure = "no memory of the host is left"
    fake.go_on.set()
    errors = await asyncio.gather(falling_asleep, *calls, return_exceptions=True)
    assert {type(error) for error in errors} <= {RuntimeError, EngineFailedError}
    assert engine.broken.is_set()


async def test_of_those_who_put_a_generator_to_sleep_and_wake_it_the_last_has_the_word() -> None:
    pytest.importorskip("monarch")
    from trainers.generator.generator import Generator

    told: list[str] = []
    may_go_on = asyncio.Event()

    class Sleeper:
        """An engine that is told to sleep and to wake."""

        async def sleep(self) -> None:
            await may_go_on.wait()
            told.append("sleep")

        async def wake(self) -> None:
            told.append("wake")

    actor: Any = SimpleNamespace(
        _engine=Sleeper(), _updating=asyncio.Lock(), _resting=asyncio.Lock(), _asleep=False, _tired=False
    )
    await Generator._rest(actor, False)
    assert told == []
    await actor._updating.acquire()  # weights are being loaded
    sleeping, waking = (asyncio.ensure_future(Generator._rest(actor, tired)) for tired in (True, False))
    await asyncio.sleep(0)
    actor._updating.release()
    may_go_on.set()
    await asyncio.gather(sleeping, waking)
    assert told in ([], ["sleep", "wake"])
    assert not actor._updating.locked()
    await Generator._rest(actor, True)
    assert actor._updating.locked(), "weights would be loaded into memory that is given away"


async def test_unreadable_outputs(fake: Fake, engine: InProcessEngine, caplog: pytest.LogCaptureFixture) -> None:
    fake.unreadable = True
    fake.go_on.set()
    errors = await asyncio.gather(*ask(engine, "a", "b"), return_exceptions=True)
    assert [type(error) for error in errors] == [EngineFailedError] * 2
    assert [bool(record.exc_info) for record in caplog.records if "the vLLM engine failed" in record.message] == [True]


async def test_an_engine_whose_process_has_ended_says_so_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("monarch")
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", "")
    await process.wait()
    engine = AsyncLLMEngine(None)
    await engine._watch_workers([process.pid])
    assert engine.broken.is_set()
    assert ["the vLLM engine failed" in record.message for record in caplog.records] == [True]


async def test_closing_cancels_the_reader_of_outputs_before_it_ends_the_process() -> None:
    reader = asyncio.create_task(asyncio.Event().wait())

    class LLM:
        errored = False
        output_handler = reader

        async def abort(self, requests: list[str]) -> None:
            assert requests == []

        def shutdown(self) -> None:
            cancelled.append(reader.cancelling())

    cancelled: list[int] = []
    await AsyncLLMEngine(LLM()).close()
    assert cancelled == [1]


async def test_two_requests_of_one_name_are_refused(fake: Fake, engine: InProcessEngine) -> None:
    (first,) = ask(engine, "same")
    await asyncio.sleep(0)
    with pytest.raises(UsageError, match="'same' is already in progress"):
        await engine.generate([1], SamplingOptions(), "same")
    fake.go_on.set()
    assert (await first).token_ids == [7]


async def test_closing_ends_the_thread_after_the_step_under_way(fake: Fake, engine: InProcessEngine) -> None:
    calls = ask(engine, "a")
    await asyncio.to_thread(fake.stepping.wait)
    calls += ask(engine, "b")
    closing = asyncio.ensure_future(engine.close())
    await asyncio.sleep(0)
    fake.go_on.set()
    await closing
    errors = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(error) for error in errors] == [GeneratorError] * 2
    engine._thread.shutdown()  # waits: it would not come back from steps without end
    assert fake.admitted == [("a", "v0.1")]


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (FileNotFoundError("dropped"), WeightsDroppedError),
        (ConnectionError("reset"), WeightsDroppedError),
        (OSError("unreachable"), GeneratorError),
    ],
)
async def test_dropped_weights_and_unfetchable_ones_differ(error: OSError, raised: type[Exception]) -> None:
    class Reader:
        """Weights of which there are none."""

        async def find(self, version: int) -> None:
            raise error

    pytest.importorskip("monarch")
    from trainers.generator.generator import Generator

    actor: Any = SimpleNamespace(_weights=Reader())
    with pytest.raises(raised, match="version 3"):
        await Generator._pull(actor, 3, None)


async def test_arguments_that_vllm_refuses_are_named(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: Any) -> None:
        raise ValueError("block_size: 7 is not allowed")

    monkeypatch.setattr(sys.modules["vllm"], "EngineArgs", refuse)
    with pytest.raises(UsageError, match="block_size: 7 is not allowed") as refused:
        InProcessEngine({"block_size": 7})
    assert refused.value.fix == "see the generator section of the recipe"


async def test_an_engine_that_does_not_start_refers_to_the_log(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**_: Any) -> None:
        raise RuntimeError("Engine core initialization failed. See root cause above.")

    monkeypatch.setattr(sys.modules["vllm"], "EngineArgs", fail)
    with pytest.raises(GeneratorError, match="did not start: Engine core initialization failed") as failed:
        InProcessEngine({})
    assert failed.value.fix is not None
    assert failed.value.fix.startswith("run.log has the errors")


@pytest.mark.parametrize("sinks", [[], [("model.layers.0.self_attn.sinks", "values")]], ids=["none", "sinks"])
def test_only_weights_that_a_reload_skips_are_loaded_after_it(fake: Fake, sinks: list[tuple[str, Any]]) -> None:
    pytest.importorskip("torch")
    whole = [("model.norm.weight", "values")]
    loaded: list[list[tuple[str, Any]]] = []
    model = SimpleNamespace(load_weights=lambda weights: loaded.append(list(weights)))
    engine: Any = SimpleNamespace(
        model_config=fake.model_config,
        vllm_config=fake.vllm_config,
        collective_rpc=lambda _, kwargs: loaded.append(list(kwargs["weights_iterator"])),
        apply_model=lambda load: load(model),
    )
    load_into(engine, [*whole, *sinks], has_adapters=False, reorders=True)
    assert loaded == [whole, *([sinks] if sinks else [])]
