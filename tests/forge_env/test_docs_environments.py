"""The programs in docs/environments.md are complete and sound."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import forge_env as fe
from forge_env.validation import Validator

TEXT = (Path(__file__).parents[2] / "docs" / "environments.md").read_text()
PROGRAMS = dict(re.findall(r"<!-- program: (\w+) -->\n```python\n(.*?)```", TEXT, re.DOTALL))


def environment(name: str) -> Any:
    namespace: dict[str, Any] = {"__name__": f"docs_{name}"}
    exec(compile(PROGRAMS[name], f"docs/environments.md:{name}", "exec", dont_inherit=True), namespace)
    classes = [value for value in namespace.values() if isinstance(value, type) and issubclass(value, fe.Environment)]
    return next(cls for cls in classes if cls.__module__ == f"docs_{name}")


def test_every_kind_is_there() -> None:
    assert set(PROGRAMS) == {"reverse", "safe", "chat", "countdown", "qa"}


@pytest.mark.parametrize("name", ["reverse", "safe", "chat", "countdown", "qa"])
async def test_programs_validate(name: str, tmp_path: Path) -> None:
    cls = environment(name)
    options: dict[str, Any] = {}
    if name == "qa":
        rows = [{"question": f"{i} + 1?", "answer": f"so\n#### {i + 1}"} for i in range(40)]
        (tmp_path / "data.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
        columns = {"prompt": "question", "answer": "answer", "gold": "answer"}
        options = {"dataset": {"path": str(tmp_path / "data.jsonl"), "columns": columns}}
    config = cls.config_class.model_validate(options)
    checks = [check async for check in Validator(lambda: cls(config), num_tasks=3).run()]
    assert [check for check in checks if check.status != "ok"] == []
