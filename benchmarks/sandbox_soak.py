"""Mixed executions with random kills: no result lost, none wrong, nothing left behind.

python -m benchmarks.sandbox_soak [--engine docker] [--count 10000] [--kill-every 200]

Every program's right answer is known. Every so often a sandbox is killed from outside, as if the machine had; a call
that fails with `SandboxError` is repeated on another sandbox, as a rollout does.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator

from forge_env.errors import SandboxError
from forge_env.sandbox import Limits, Sandbox, SandboxEngine, open_engine
from forge_env.sandbox.engines import load_engine

DAEMON = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(100)\nprint({n})"
LEFT = "open('/tmp/left', 'w').write('x'); open('left', 'w').write('x'); print({n})"
KINDS = ["print"] * 60 + ["fail"] * 10 + ["calls"] * 15 + ["wrong"] * 5 + ["daemon"] * 4 + ["left"] * 4 + ["late"] * 2


async def one(sandbox: Sandbox, kind: str, number: int) -> bool:
    """Run one program; whether its outcome is the right one."""
    if kind == "print":
        return (await sandbox.run_python(f"print({number} * 7)")).stdout == f"{number * 7}\n"
    if kind == "fail":
        result = await sandbox.run_python(f"raise SystemExit({number % 200 + 1})")
        return result.exit_code == number % 200 + 1
    if kind in ("calls", "wrong"):
        code = "def f(x): return x * 3" if kind == "calls" else "import os\ndef f(x): os._exit(0)"
        outcomes = (await sandbox.run_calls(code, [f"f({number})", "f(2)"])).outcomes
        right = [outcome.value for outcome in outcomes] == [number * 3, 6]
        return right if kind == "calls" else not outcomes
    if kind in ("daemon", "left"):
        source = (DAEMON if kind == "daemon" else LEFT).replace("{n}", str(number))
        return (await sandbox.run_python(source)).stdout == f"{number}\n"
    return (await sandbox.run_python("while True: pass", limits=Limits(wall_s=0.2))).timed_out


async def soak(engine: SandboxEngine, count: int, kill_every: int, seed: int) -> collections.Counter[str]:
    """`count` executions by as many callers as there are sandboxes."""
    chance = random.Random(seed)
    work: Iterator[int] = iter(range(count))
    seen: collections.Counter[str] = collections.Counter()

    async def caller() -> None:
        for number in work:
            kind = chance.choice(KINDS)
            while True:
                if kill_every and chance.randrange(kill_every) == 0:
                    seen["killed"] += await asyncio.to_thread(kill_one, engine.name, chance)
                try:
                    async with engine.session() as sandbox:
                        seen["right" if await one(sandbox, kind, number) else f"WRONG {kind}"] += 1
                    break
                except SandboxError:
                    seen["repeated"] += 1

    await asyncio.gather(*(caller() for _ in range(4 * len(os.sched_getaffinity(0)))))
    return seen


def kill_one(engine: str, chance: random.Random) -> int:
    """Kill one of our sandboxes from outside. Returns how many."""
    mine = [box for box in load_engine(engine).running() if box.owner_pid == os.getpid()]
    if not mine:
        return 0
    victim = chance.choice(mine).id
    command = ["kill", "-9", victim] if engine == "local" else ["docker", "kill", victim]
    return int(subprocess.run(command, capture_output=True, check=False).returncode == 0)


async def run(args: argparse.Namespace) -> int:
    start = time.perf_counter()
    async with open_engine(args.engine, concurrency=args.concurrency) as engine:
        seen = await soak(engine, args.count, args.kill_every, args.seed)
        stats = engine.stats()
        cls = type(engine)
    left = [box for box in cls.running() if box.owner_pid == os.getpid()]
    seconds = time.perf_counter() - start
    print(f"{args.engine}: {args.count} executions in {seconds:.0f} s ({args.count / seconds:.0f}/s): {dict(seen)}")
    print(f"  pool: { {k: v for k, v in stats.items() if isinstance(v, (int, float))} }")
    print(f"  left behind: {len(left)} sandboxes")
    return 0 if seen["right"] == args.count and not left else 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", default="docker")
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--kill-every", type=int, default=200, metavar="N", help="kill a sandbox every N executions")
    parser.add_argument("--seed", type=int, default=0)
    sys.exit(asyncio.run(run(parser.parse_args())))


if __name__ == "__main__":
    main()
