"""The page about coding agents is what it says: its module and its recipe load, and its tables name each agent."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType
from typing import get_args

import yaml

import forge_env as fe
from benchmarks.conformance import VENVS
from forge_env.config.recipe import RunConfig

PAGE = Path(fe.__file__).parents[1] / "docs/environments/agents.md"


def code(name: str) -> str:
    """A block of the page."""
    return str(re.findall(rf"<!-- {name} -->\n```\w*\n(.*?)```", PAGE.read_text(), re.DOTALL)[0])


def page() -> ModuleType:
    """The page's module."""
    module = ModuleType("agents_of_the_page")
    exec(compile(code("agents"), "coding_agents.py", "exec", dont_inherit=True), module.__dict__)
    return module


def test_each_agent_gets_the_prompt() -> None:
    module = page()
    names = get_args(module.Config.model_fields["agent"].annotation)
    assert set(names) == set(module.COMMANDS)
    for name in names:
        environment = module.Agents(module.Config(agent=name))
        task = environment.task("train", 0)
        argv = environment.argv(task)
        assert task.prompt in argv
        assert environment.environment(task)["HOME"] == "/root"


def test_the_recipe_is_valid() -> None:
    config = RunConfig.model_validate(yaml.safe_load(code("recipe")))
    module, options = page(), config.environment.options
    assert config.environment.name == "coding_agents:Agents"
    assert module.Config(**options).agent == "codex"
    assert set(module.Agents.splits) >= {config.evaluation.split, *config.evaluation.extra_splits}


def test_the_table_has_the_versions_of_the_kit() -> None:
    pins = re.findall(r"(\S+)@(\S+)", VENVS["programs"].npm)
    pins += re.findall(r"(mini-swe-agent)==(\S+)", VENVS["programs"].packages)
    versions = {version for name, version in pins if name != "node"}
    table = PAGE.read_text().partition("## Tested agents")[2]
    assert set(re.findall(r"^\| [\w\- ]+ (\d+\.\d+\.\d+) \|", table, re.MULTILINE)) == versions
