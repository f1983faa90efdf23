"""Whole evaluations against an endpoint that misbehaves: every fault is named, and none is the model's zero."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any

import pytest

import forge_env as fe
from forge_env.endpoint.policy import EndpointOptions, EndpointPolicy
from forge_env.errors import GeneratorError
from forge_env.sandbox.protocol import Sandbox, SandboxEngine
from forge_env.sandbox.spec import SandboxSpec
from tests.forge_env.endpoint.server import Server, completion, delta, events, http, tool_call
from tests.forge_env.endpoint.test_endpoint import FAULTS
from tests.forge_env.evaluation.toys import Sums

REFUSALS = {
    "401": (http({"error": {"message": "bad key"}}, 401), "AccessDeniedError"),
    "402": (http({"error": {"message": "pay"}}, 402), "OutOfCreditError"),
    "404": (http({"error": {"message": "no model"}}, 404), "NoSuchModelError"),
    "422": (http({"error": {"message": "no"}}, 422), "RequestRefusedError"),
}
SILENCE = {"never answers": (None, "EndpointTimeoutError")}
QUICK: dict[str, Any] = {"retries": 1, "first_delay_s": 0.0, "sample_retries": 0, "timeout_s": 20.0}


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "results"


def number(request: dict[str, Any]) -> int:
    question = next(message for message in request["messages"] if message["role"] == "user")
    return int(question["content"].split()[0])


def right(request: dict[str, Any], n: int) -> dict[str, Any]:
    return completion(str(number(request) + 1))


@pytest.mark.parametrize("fault", [*FAULTS, *REFUSALS, *SILENCE])
async def test_a_fault_is_named_never_scored_and_made_up_for_later(fault: str, out: Path) -> None:
    """Three of twelve tasks always meet the fault: the score is that of the others, and resuming plays those three."""
    answer, kind = (FAULTS | REFUSALS | SILENCE)[fault]
    settings = {**QUICK, "timeout_s": 0.3} if fault in SILENCE else QUICK
    broken = True

    def behave(request: dict[str, Any], n: int) -> Any:
        return answer if broken and number(request) >= 9 else right(request, n)

    async with Server(behave) as server:
        options = {"base_url": server.url, "out": out, "max_failures": 100, **settings}
        first = await fe.evaluate_async(Sums, "m", max_samples=1, **options)
        broken, asked = False, len(server.requests)
        again = await fe.evaluate_async(Sums, "m", resume=True, **options)
        played_again = len(server.requests) - asked
    item = first.summary.environments["Sums"]
    assert (item.score.value, item.samples) == (1.0, 9)
    assert set(item.invalid) == {kind}
    assert sum(item.invalid.values()) + item.missing == played_again == 3
    assert first.summary.request_errors[kind] >= 1
    assert all(kind in (sample.error or "") for sample in first.samples if not sample.valid)
    whole = again.summary.environments["Sums"]
    assert (again.summary.status, whole.samples, whole.invalid) == ("complete", 12, {})
    assert whole.score.value == 1.0


async def test_what_the_model_gets_wrong_in_a_call_is_the_models(out: Path) -> None:
    """Calls of a right shape with wrong contents are answered by the environment, and the sample counts."""
    wrong = [
        tool_call("add", "{oops", "a"),
        tool_call("nonesuch", {"a": 1}, "b"),
        tool_call("add", {"b": "x"}, "c"),
        tool_call("add", "[1]", "d"),
    ]

    def behave(request: dict[str, Any], n: int) -> Any:
        return completion(None, calls=wrong) if request["messages"][-1]["role"] == "user" else right(request, n)

    async with Server(behave) as server:
        result = await fe.evaluate_async(Sums, "m", base_url=server.url, out=out, num_tasks=2, **QUICK)
    item = result.summary.environments["Sums"]
    assert (item.samples, item.invalid, result.summary.request_errors) == (2, {}, {})
    answers = server.requests[-1]["messages"][-4:]
    assert [answer["tool_call_id"] for answer in answers] == ["a", "b", "c", "d"]
    assert all(answer["content"] for answer in answers)


async def test_a_full_context_truncates_and_is_counted_apart(out: Path) -> None:
    full = http({"error": {"message": "This model's maximum context length is 512 tokens."}}, 400)
    async with Server(lambda request, n: full if number(request) >= 9 else right(request, n)) as server:
        result = await fe.evaluate_async(Sums, "m", base_url=server.url, out=out, **QUICK)
    item = result.summary.environments["Sums"]
    assert (item.samples, item.truncated, item.invalid) == (12, {"context": 3}, {})
    assert (item.score.value, item.untruncated.value) == (0.75, 1.0)


@pytest.mark.slow
async def test_a_storm_of_429s_slows_down_and_loses_nothing(out: Path) -> None:
    """An endpoint with four places that refuses everything beyond them, and everything for a while."""
    server: Server

    async def behave(request: dict[str, Any], n: int) -> Any:
        if server.in_flight > 4 or 100 <= n < 140:
            return http({"error": {"message": "slow down"}}, 429, {"retry-after": "0.001"})
        await asyncio.sleep(0.002)
        return right(request, n)

    async with Server(behave) as server:
        result = await fe.evaluate_async(
            Sums,
            "m",
            base_url=server.url,
            out=out,
            epochs=40,
            start_concurrency=64,
            concurrency=64,
            **{**QUICK, "retries": 60, "longest_delay_s": 0.02},
        )
    item = result.summary.environments["Sums"]
    assert (item.samples, item.invalid, item.missing) == (480, {}, 0)
    assert item.score.value == 1.0
    refused = result.summary.request_errors["EndpointOverloadedError"]
    assert len(server.requests) == 480 + refused
    assert refused < 480  # it adapts: asking on at full rate would be refused fifteen times out of sixteen


async def test_an_endpoint_that_closes_kept_connections(out: Path) -> None:
    async with Server(right, hangs_up=True) as server:
        result = await fe.evaluate_async(Sums, "m", base_url=server.url, out=out, epochs=5, **{**QUICK, "retries": 6})
    item = result.summary.environments["Sums"]
    assert (item.samples, item.invalid) == (60, {})
    assert item.score.value == 1.0
    assert server.connections >= 60


async def test_connections_are_kept_where_the_endpoint_keeps_them(out: Path) -> None:
    async with Server(right) as server:
        await fe.evaluate_async(Sums, "m", base_url=server.url, out=out, epochs=5, concurrency=4, **QUICK)
    assert server.connections <= 5


async def test_an_endpoint_that_dies_in_the_middle(out: Path) -> None:
    async with Server(right) as server:
        first = await fe.evaluate_async(Sums, "m", base_url=server.url, out=out, num_tasks=5, **QUICK)
        url = server.url
    with pytest.raises(GeneratorError, match="start the server") as caught:
        await fe.evaluate_async(Sums, "m", base_url=url, out=out, resume=True, **QUICK)
    assert type(caught.value).__name__ == "EndpointUnreachableError"
    assert first.summary.environments["Sums"].samples == 5
    assert json.loads((out / "summary.json").read_text())["environments"]["Sums"]["samples"] == 5


async def test_ten_megabytes_are_recorded_and_read_back(out: Path) -> None:
    text = "4\u00e9\n" * 3_000_000
    async with Server(lambda request, n: completion(text)) as server:
        result = await fe.evaluate_async(Sums, "m", base_url=server.url, out=out, num_tasks=1, **QUICK)
    (trajectory,) = result.trajectories()
    assert trajectory.turns[0].message.content == text
    assert (trajectory.valid, trajectory.reward) == (True, 0.0)


async def test_ten_megabytes_in_a_stream_of_small_pieces() -> None:
    pieces = [delta(content="four" * 200, reasoning_content="hm") for _ in range(5000)]
    pieces += [
        delta(tool_calls=[{"index": 0, "id": "a", "function": {"name": "", "arguments": "x" * 1000}}])
        for _ in range(5000)
    ]
    answer = events(*pieces, delta(finish="stop"))
    assert len(answer) > 10_000_000
    async with Server(lambda request, n: answer) as server:
        options = EndpointOptions(model="m", base_url=server.url, stream=True)
        async with EndpointPolicy(options) as policy:
            reply = await policy.session([]).reply([fe.Message(role="user", content="?")])
    assert reply.message.content == "four" * 1_000_000
    assert len(reply.message.tool_calls[0].function.arguments) == 5_000_000


@pytest.mark.parametrize(
    "text", ["\u00e9t\u00e9 \U0001f40d \u4e2d \u202e\u0000\x1b[31m", "\ud83d half a character", "\ufdd0\uffff"]
)
async def test_unicode_reaches_transcript_and_report(text: str, out: Path) -> None:
    async with Server(lambda request, n: http(json.dumps(completion(text)).encode())) as server:
        result = await fe.evaluate_async(Sums, "m", base_url=server.url, out=out, num_tasks=2, **QUICK)
    assert (result.summary.status, result.summary.environments["Sums"].samples) == ("complete", 2)
    stored = [trajectory.turns[0].message.content for trajectory in result.trajectories()]
    assert stored == [text.replace("\ud83d", "\ufffd")] * 2


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, ssl.SSLContext]]:
    """Makes self-signed certificates: `(file, context of a server that has it)`."""
    pytest.importorskip("cryptography")
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    folder = tmp_path_factory.mktemp("certificates")

    def make(*, days: int, address: str = "127.0.0.1") -> tuple[Path, ssl.SSLContext]:
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "endpoint")])
        now = datetime.now(UTC)
        builder = (
            x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
            .not_valid_before(now - timedelta(days=9))
            .not_valid_after(now + timedelta(days=days))
            .add_extension(x509.SubjectAlternativeName([x509.IPAddress(IPv4Address(address))]), critical=False)
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        )
        path = folder / f"{days}-{address}.pem"
        plain = serialization.NoEncryption()
        secret = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)
        path.write_bytes(secret + builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(path)
        return path, context

    return make


@pytest.mark.parametrize(
    ("days", "address", "trusted", "reason"),
    [(-1, "127.0.0.1", True, "expired"), (9, "127.0.0.1", False, "self-signed"), (9, "127.0.0.2", True, "mismatch")],
)
async def test_a_certificate_that_is_not_to_be_trusted(
    days: int, address: str, trusted: bool, reason: str, certificate: Any, monkeypatch: pytest.MonkeyPatch, out: Path
) -> None:
    path, context = certificate(days=days, address=address)
    if trusted:
        monkeypatch.setenv("SSL_CERT_FILE", str(path))
    async with Server(right, tls=context) as server:
        with pytest.raises(GeneratorError, match=reason) as caught:
            await fe.evaluate_async(Sums, "m", base_url=server.url, out=out, **QUICK)
        async with EndpointPolicy(EndpointOptions(model="m", base_url=server.url)) as policy:
            with pytest.raises(GeneratorError):
                await policy.session([]).reply([fe.Message(role="user", content="?")])
    assert type(caught.value).__name__ == "UntrustedEndpointError"
    assert "SSL_CERT_FILE" in (caught.value.fix or "")
    assert policy.errors == {"UntrustedEndpointError": 1}  # asking again would not help
    assert server.requests == []


async def test_own_authority_is_trusted(certificate: Any, monkeypatch: pytest.MonkeyPatch, out: Path) -> None:
    path, context = certificate(days=9)
    monkeypatch.setenv("SSL_CERT_FILE", str(path))
    async with Server(right, tls=context) as server:
        result = await fe.evaluate_async(Sums, "m", base_url=server.url, out=out, num_tasks=2, **QUICK)
    assert result.summary.status == "complete"


async def test_https_to_an_endpoint_that_speaks_http(out: Path) -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(http(b"speak HTTP", 400))
        writer.close()

    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server:
        url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
        with pytest.raises(GeneratorError, match="is it http://"):
            await fe.evaluate_async(Sums, "m", base_url=url, out=out, **QUICK)


class TwoPlaces(SandboxEngine):
    """Two sandboxes at most; notes how many callers wait."""

    def __init__(self) -> None:
        self.places = asyncio.Semaphore(2)
        self.waiting = self.most_waiting = 0

    async def acquire(self, spec: SandboxSpec | None = None) -> Sandbox:
        self.waiting += 1
        self.most_waiting = max(self.most_waiting, self.waiting)
        await self.places.acquire()
        self.waiting -= 1
        return object()

    async def release(self, sandbox: Sandbox) -> None:
        self.places.release()


class Boxed(Sums):
    """Holds a sandbox for as long as the episode takes."""

    async def setup(self, task: fe.Task) -> None:
        self.box = await self.sandboxes.acquire()

    async def close(self) -> None:
        if hasattr(self, "box"):
            await self.sandboxes.release(self.box)
            del self.box


async def test_samples_wait_for_sandboxes_before_they_start(out: Path) -> None:
    """An endpoint with room for all of them must not pile up samples that hold nothing but a place in a queue."""
    engine = TwoPlaces()

    async def slowly(request: dict[str, Any], n: int) -> Any:
        await asyncio.sleep(0.001)
        return right(request, n)

    async with Server(slowly) as server:
        result = await fe.evaluate_async(
            Boxed, "m", base_url=server.url, out=out, epochs=10, start_concurrency=64, sandboxes=engine, **QUICK
        )
    assert result.summary.environments["Boxed"].samples == 120
    assert engine.most_waiting <= 4
    assert server.most_in_flight <= 2


@pytest.mark.slow
async def test_waiting_for_the_endpoints_patience_is_no_working_time(out: Path) -> None:
    """The endpoint says 429 for longer than the limit: that ends a sample by wall time, and none by working time."""

    def behave(request: dict[str, Any], n: int) -> Any:
        return http({}, 429, {"retry-after": "0.6"}) if n % 4 else right(request, n)

    options: dict[str, Any] = {**QUICK, "retries": 9, "max_samples": 1, "num_tasks": 3}
    async with Server(behave) as server:
        working = await fe.evaluate_async(Sums, "m", base_url=server.url, out=out, working_limit=0.5, **options)
    async with Server(behave) as server:
        wall = await fe.evaluate_async(
            Sums, "m", base_url=server.url, out=out.with_name("wall"), time_limit=0.5, **options
        )
    item = working.summary.environments["Sums"]
    assert (item.samples, item.truncated) == (3, {})
    assert item.waited_s > 0.5
    lost = wall.summary.environments["Sums"]
    assert (lost.samples, lost.truncated, lost.invalid) == (1, {}, {"EndpointOverloadedError": 2})


@pytest.mark.parametrize("limit", ["time_limit", "working_limit"])
async def test_a_limit_that_ends_an_endpoints_silence_is_no_zero(limit: str, out: Path) -> None:
    options: dict[str, Any] = {**QUICK, limit: 0.05}
    async with Server(lambda request, n: None) as server:
        result = await fe.evaluate_async(Sums, "m", base_url=server.url, out=out, num_tasks=2, **options)
    item = result.summary.environments["Sums"]
    assert (item.samples, item.truncated, item.invalid) == (0, {}, {"EndpointTimeoutError": 2})
    assert result.summary.request_errors == {"EndpointTimeoutError": 2}


async def test_a_limit_that_ends_slow_answers_truncates(out: Path) -> None:
    """Every turn is answered after a fifth of the limit: none of them is the endpoint's silence."""

    async def slowly(request: dict[str, Any], n: int) -> Any:
        await asyncio.sleep(0.3)
        return completion(None, calls=[tool_call("add", {"a": 1})])

    async with Server(slowly) as server:
        result = await fe.evaluate_async(Sums, "m", base_url=server.url, out=out, num_tasks=2, time_limit=1.5, **QUICK)
    item = result.summary.environments["Sums"]
    assert (item.samples, item.truncated, item.invalid) == (2, {"time": 2}, {})
