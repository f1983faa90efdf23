"""The official conformance suite of MCP against `/mcp`: what an environment has, it has as the standard says."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

import forge_env as fe
from forge_env.types import ToolSpec
from tests.forge_env.serve.serving import Adder, serving

BIN = Path(sys.prefix) / "bin"
SUITE = Path(sys.prefix) / "node_modules/@modelcontextprotocol/conformance/dist/index.js"
TIMED = re.compile(r"server-(.+)-\d{4}-\d\d-\d\dT")
"""A folder of results: a scenario's name, and when it was run."""
NOT_OURS = {
    "tools answer with text only": """
        tools-call-image tools-call-audio tools-call-embedded-resource tools-call-mixed-content
    """,
    "tools send nothing before their answer": "tools-call-with-logging tools-call-with-progress",
    "tools ask the agent nothing back": """
        tools-call-sampling tools-call-elicitation elicitation-sep1034-defaults elicitation-sep1330-enums
    """,
    "environments have no resources": """
        resources-list resources-read-text resources-read-binary resources-templates-read resources-subscribe
        resources-unsubscribe
    """,
    "the only prompt is the task": """
        prompts-get-simple prompts-get-with-args prompts-get-embedded-resource prompts-get-with-image
    """,
    "there are no log levels or completions": "logging-set-level completion-complete",
}
"""Scenarios of what an environment does not have, by the reason."""
PASSED = [
    "server-initialize",
    "ping",
    "tools-list",
    "tools-call-simple-text",
    "tools-call-error",
    "json-schema-2020-12",
    "server-sse-polling",
    "server-sse-multiple-streams",
    "prompts-list",
    "dns-rebinding-protection",
]
WHY = {name: reason for reason, names in NOT_OURS.items() for name in names.split()}


class Fixture(Adder):
    """The tools that the suite calls by name, as far as an environment can have them."""

    @fe.tool
    async def test_simple_text(self) -> str:
        """Say something."""
        return "This is a simple text response for testing."

    @fe.tool
    async def test_error_handling(self) -> str:
        """Fail."""
        raise fe.ToolError("This tool intentionally returns an error for testing")

    @property
    def tools(self) -> list[ToolSpec]:
        """With one that has every keyword of JSON Schema that must arrive."""
        address = {"type": "object", "properties": {"street": {"type": "string"}, "city": {"type": "string"}}}
        schema = {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "type": "object",
            "$defs": {"address": address},
            "properties": {"name": {"type": "string"}, "address": {"$ref": "#/$defs/address"}},
            "additionalProperties": False,
        }
        return [*super().tools, ToolSpec(name="json_schema_2020_12_tool", description="?", parameters=schema)]


async def run_suite(folder: Path) -> None:
    """Let the suite write what it finds below a folder."""
    async with serving(Fixture) as (url, _):
        command = [BIN / "node", SUITE, "server", "--url", f"{url}/mcp", "--suite", "all", "-o", folder]
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.DEVNULL)
        await process.wait()
    assert Fixture.opened == 0


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """The checks of each scenario by its name."""
    folder = tmp_path_factory.mktemp("mcp")
    asyncio.run(run_suite(folder))
    files = {TIMED.match(path.parent.name): path for path in folder.glob("server-*/checks.json")}
    found = {name[1]: json.loads(path.read_text()) for name, path in files.items() if name}
    assert found.keys() == {*PASSED, *WHY}
    return found


@pytest.mark.parametrize(
    "name",
    [*PASSED, *(pytest.param(name, marks=pytest.mark.xfail(strict=True, reason=why)) for name, why in WHY.items())],
)
def test_scenario(name: str, results: dict[str, list[dict[str, Any]]]) -> None:
    assert [check for check in results[name] if check["status"] == "FAILURE"] == []
