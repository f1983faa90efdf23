"""`forge-env sandbox run|build|ps|reap|bench|audit`: run code in a sandbox, and manage sandboxes."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import fields
from functools import partial
from pathlib import Path

from forge_env.cli.command import Parser, add_docker_host, number
from forge_env.config.reader import construct, parse_overrides
from forge_env.errors import ForgeError, UsageError
from forge_env.figures import duration
from forge_env.machine import usable_cpus
from forge_env.plugins import installed
from forge_env.sandbox import (
    ExecResult,
    Images,
    Inventory,
    Judging,
    Limits,
    SandboxEngine,
    SandboxSpec,
    open_engine,
)
from forge_env.sandbox.engines import GROUP, load_engine
from forge_env.sandbox_audit.attacks import ATTACKS, GROUPS, Attack
from forge_env.visible import visible

TIMED_OUT = 124
_SIGNALLED = 128
Opener = Callable[..., SandboxEngine]
"""`open_engine` with the command line's engine options."""


def add_arguments(parser: Parser) -> None:
    """Add the command's actions and their arguments."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", title="actions", required=True)

    program = actions.add_parser(
        "run",
        help="run a program in a sandbox",
        description="Run a Python program (or a .sh script) in a fresh sandbox; exits with the program's exit code "
        "(124: timed out, 137: out of memory or killed).",
    )
    program.add_argument("file", metavar="FILE", help="a .py or .sh file, or - for Python on standard input")
    limits = ", ".join(field.name for field in fields(Limits))
    program.add_argument("--limit", action="append", default=[], metavar="KEY=VALUE", help=f"a limit: {limits}")
    program.add_argument("--image", default="python", help="image to run in")
    program.add_argument("--network", action="store_true", help="allow network access")
    program.add_argument(
        "--allow", action="append", default=[], metavar="HOST[:PORT]", help="allow HTTP(S) connections to this host"
    )
    _finish(program, run_program)

    build = actions.add_parser("build", help="build the image if it is missing")
    build.add_argument("--image", help="image, or folder with a Dockerfile, to build on (default: python)")
    build.add_argument("--base-image", help="base of the bundled image, such as python:3.12-slim")
    _finish(build, run_build)

    ps = actions.add_parser("ps", help="list running sandboxes")
    ps.set_defaults(act=run_ps)
    reap = actions.add_parser("reap", help="remove sandboxes and files of dead processes")
    reap.add_argument("--images", action="store_true", help="also remove images of other versions that are not in use")
    reap.set_defaults(act=run_reap)

    bench = actions.add_parser("bench", help="measure sandboxes on this machine")
    bench.add_argument("--seconds", type=number, default=5.0, help="length of the throughput part, in seconds")
    bench.add_argument("--concurrency", type=int, help="sandboxes at once (default: two per CPU)")
    _finish(bench, run_bench)

    audit = actions.add_parser(
        "audit",
        help="attack a sandbox on this machine, and print which attacks were contained",
        description="Run about 160 hostile programs (one to three minutes) against a sandbox of this machine, beside "
        "another sandbox that must not be affected, and print which were contained. Exits with 1 if any was not. Run "
        "it after changing the kernel, Docker or an image, as the user who will run sandboxes.",
    )
    audit.add_argument("--group", action="append", metavar="GROUP", help=f"only this group: {', '.join(GROUPS)}")
    audit.add_argument("--attack", action="append", metavar="NAME", help="only this program; --list shows the names")
    audit.add_argument("--list", action="store_true", help="list the programs without running them")
    _finish(audit, run_audit)


def _finish(parser: argparse.ArgumentParser, act: Callable[[argparse.Namespace], int]) -> None:
    parser.add_argument("--engine", default="auto", help="auto, docker, local, kubernetes, e2b")
    parser.add_argument("--option", action="append", default=[], metavar="KEY=VALUE", help="an option of the engine")
    add_docker_host(parser)
    parser.set_defaults(act=act)


def _opener(args: argparse.Namespace) -> Opener:
    return partial(open_engine, args.engine, docker_host=args.docker_host, **dict(parse_overrides(args.option)))


def run(args: argparse.Namespace) -> int:
    """Run the chosen action."""
    code: int = args.act(args)
    return code


def run_program(args: argparse.Namespace) -> int:
    """`sandbox run`: print the program's output (escaped), and on stderr the limits reached; return its exit code."""
    limits: Limits = construct(Limits, dict(parse_overrides(args.limit)), "limit")
    source = sys.stdin.read() if args.file == "-" else Path(args.file).read_text(encoding="utf-8", errors="replace")
    stdin = "" if args.file == "-" or sys.stdin is None or sys.stdin.isatty() else sys.stdin.read()
    spec = SandboxSpec(image=args.image, network=args.network, allow=tuple(args.allow))
    result = asyncio.run(_run_once(_opener(args), spec, source, stdin, limits, shell=args.file.endswith(".sh")))
    sys.stdout.write(visible(result.stdout))
    sys.stdout.flush()
    sys.stderr.write(visible(result.stderr))
    return _report(result, limits)


async def _run_once(
    open_engine: Opener, spec: SandboxSpec, source: str, stdin: str, limits: Limits, *, shell: bool
) -> ExecResult:
    async with open_engine(concurrency=1, warm=0) as engine, engine.session(spec) as sandbox:
        if not shell:
            return await sandbox.run_python(source, stdin=stdin, limits=limits)
        return await sandbox.exec(["bash", "-c", source], stdin=stdin, limits=limits)


def _report(result: ExecResult, limits: Limits) -> int:
    """Print on stderr which limit was reached; return the exit code that a shell would give."""
    usage = result.usage
    wall, cpu = (duration(seconds, fine=True) for seconds in (usage.wall_s, usage.cpu_s))
    spent = f"{wall} wall, {cpu} CPU, {usage.peak_memory_mb:.0f} MB"
    if result.truncated:
        print(f"forge-env: output was cut to {limits.output_bytes} bytes (output_bytes)", file=sys.stderr)
    if result.timed_out:
        print(f"forge-env: timed out after {spent} (wall_s={limits.wall_s:g}, cpu_s={limits.cpu_s:g})", file=sys.stderr)
        return TIMED_OUT
    if result.out_of_memory:
        print(f"forge-env: out of memory after {spent} (memory_mb={limits.memory_mb})", file=sys.stderr)
    if result.signal is not None:
        print(f"forge-env: ended by signal {result.signal} after {spent}", file=sys.stderr)
        return _SIGNALLED + result.signal
    return result.exit_code or 0


def run_build(args: argparse.Namespace) -> int:
    """`sandbox build`: build an image if it is missing, and print its name."""
    started = time.monotonic()
    name = asyncio.run(_build(_opener(args)(base_image=args.base_image), args.image))
    print(f"{name}  ({duration(time.monotonic() - started)})")
    return 0


async def _build(engine: SandboxEngine, image: str | None) -> str:
    try:
        return await Images.of(engine).build(image)
    finally:
        await engine.close()


def run_ps(args: argparse.Namespace) -> int:
    """`sandbox ps`: list the sandboxes of all engines."""
    rows = [("ENGINE", "ID", "OWNER", "AGE", "IMAGE")]
    for name in installed(GROUP):
        engine = load_engine(name)
        for box in engine.running() if issubclass(engine, Inventory) else ():
            owner = "abandoned" if box.abandoned else f"pid {box.owner_pid}" if box.owner_pid else "elsewhere"
            age = duration(time.time() - box.started) if box.started else "?"
            rows.append((name, box.id, owner, age, box.image))
    for row in rows:
        print(f"{row[0]:<8} {row[1]:<14} {row[2]:<12} {row[3]:<10} {row[4]}")
    return 0


def run_reap(args: argparse.Namespace) -> int:
    """`sandbox reap`: remove sandboxes of dead owners and, with `--images`, unused images of other versions."""
    for name in installed(GROUP):
        engine = load_engine(name)
        removed = engine.reap_abandoned() if issubclass(engine, Inventory) else 0
        print(f"{name}: {removed} removed")
        for image in engine.prune() if args.images and issubclass(engine, Images) else ():
            print(f"  {image}")
    return 0


def run_audit(args: argparse.Namespace) -> int:
    """`sandbox audit`: run attacks on a sandbox; return 0 if all were contained."""
    groups, names = args.group or GROUPS, args.attack
    if unknown := sorted(set(groups) - set(GROUPS)):
        raise UsageError(f"there is no group {unknown[0]!r}", fix=f"use one of: {', '.join(GROUPS)}")
    if names and (missing := sorted(set(names) - {attack.name for attack in ATTACKS})):
        raise UsageError(f"there is no attack {missing[0]!r}", fix="see forge-env sandbox audit --list")
    attacks = [attack for attack in ATTACKS if attack.group in groups and (not names or attack.name in names)]
    if args.list:
        for attack in attacks:
            print(f"{attack.group:<11} {attack.name:<31} {attack.tries}")
        return 0
    return asyncio.run(_audit(_opener(args), attacks))


async def _audit(open_engine: Opener, attacks: list[Attack]) -> int:
    from forge_env.sandbox_audit.audit import audit

    broken = 0
    async with open_engine(concurrency=2, warm=2) as engine:
        print(f"{len(attacks)} attacks on the {engine.name} engine")
        async for finding in audit(engine, attacks):
            broken += bool(finding.problems)
            verdict = visible("; ".join(finding.problems)) or "contained"
            print(f"  {finding.attack.group:<11} {finding.attack.name:<31} {verdict}", flush=True)
            if finding.problems:
                print(f"  {'':<11} {finding.attack.tries}", flush=True)
    print(f"{len(attacks) - broken} of {len(attacks)} contained")
    return 1 if broken else 0


def run_bench(args: argparse.Namespace) -> int:
    """`sandbox bench`: measure latency and throughput of sandboxes on this machine."""
    if args.seconds <= 0:
        raise UsageError(f"--seconds {args.seconds:g} is not a valid time", fix="give a positive number")
    concurrency = args.concurrency or 2 * usable_cpus()
    asyncio.run(_bench(_opener(args), concurrency, args.seconds))
    return 0


WARM = 4 * usable_cpus()
"""Maximum sandboxes started before a benchmark; the pool then grows as far as the machine's memory allows."""


async def _bench(open_engine: Opener, concurrency: int, seconds: float) -> None:
    started = time.perf_counter()
    async with open_engine(concurrency=concurrency, warm=min(concurrency, WARM)) as engine:
        print(f"{engine.name} engine, {concurrency} sandboxes, started in {duration(time.perf_counter() - started)}")
        for what, step in _steps(engine):
            times = sorted([await _timed(step) for _ in range(200)])
            print(f"  {what:<34} p50 {times[100]:6.2f} ms   p99 {times[197]:6.2f} ms")
        for what, step in _steps(engine):
            print(f"  {what:<34} {await _rate(step, concurrency, seconds / 3):6.0f} /s", flush=True)


def _steps(engine: SandboxEngine) -> Iterator[tuple[str, Callable[[], Awaitable[None]]]]:
    cases = "".join(f"    def test_{n}(self): self.assertEqual({n} + 1, {n + 1})\n" for n in range(20))
    unittest = f"import unittest\nclass T(unittest.TestCase):\n{cases}unittest.main()"
    calls = [f"f({n})" for n in range(20)]

    async def program(source: str) -> None:
        async with engine.session() as sandbox:
            _check(await sandbox.run_python(source))

    async def judged() -> None:
        async with engine.session() as sandbox:
            _check((await Judging.of(sandbox).run_calls("def f(x): return x + 1", calls)).execution)

    yield "acquire, print(1+1), release", lambda: program("print(1+1)")
    yield "acquire, 20 unittest cases, release", lambda: program(unittest)
    yield "acquire, 20 judged calls, release", judged


def _check(result: ExecResult) -> None:
    if not result.ok:
        raise ForgeError(f"the benchmark's program failed: {result.stderr[-300:]}")


async def _timed(step: Callable[[], Awaitable[None]]) -> float:
    start = time.perf_counter()
    await step()
    return (time.perf_counter() - start) * 1e3


async def _rate(step: Callable[[], Awaitable[None]], concurrency: int, seconds: float) -> float:
    """Measure executions per second with `concurrency` concurrent callers."""
    start = time.perf_counter()

    async def caller() -> int:
        count = 0
        while time.perf_counter() - start < seconds:
            await step()
            count += 1
        return count

    done = await asyncio.gather(*(caller() for _ in range(concurrency)))
    return sum(done) / (time.perf_counter() - start)
