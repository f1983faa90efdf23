"""What is served is what `/openapi.json` says: Schemathesis sends what it allows, and what it doesn't."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Callable
from pathlib import Path

from tests.forge_env.serve.serving import Adder, serving

PROGRAM = Path(sys.prefix) / "bin/schemathesis"
OPTIONS = ["--seed=1", "--max-examples=20", "--generation-database=none", "--suppress-health-check=all", "--no-color"]


async def test_answers_match_the_description(record_property: Callable[[str, object], None], tmp_path: Path) -> None:
    async with serving(max_sessions=10_000) as (url, _):
        command = [PROGRAM, "run", f"{url}/openapi.json", *OPTIONS]
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*command, cwd=tmp_path, stdout=pipe)
        printed = (await process.communicate())[0].decode()
    assert process.returncode == 0, printed
    made = re.search(r"(\d+) generated, (\d+) passed", printed)
    assert made, printed
    record_property("passed", f"{made[2]} of {made[1]} requests")
    assert Adder.opened == 0
