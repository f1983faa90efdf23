"""The card of a published model or run: README.md with the run's digest, and a picture of its curves."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import yaml

from forge_env.files import write_whole
from forge_env.machine import cache_dir
from forge_env.view.digest import Digest, digest
from forge_env.view.report import markdown, write_picture

PICTURE = "curves.png"


def write_card(out: Path, run: Path, kind: Literal["model", "run"]) -> None:
    """Write `README.md` and `curves.png`, made from the record of a run or an evaluation."""
    found = digest(run, cache=cache_dir())
    write_picture(found, out / PICTURE)
    front = yaml.safe_dump(_front(found, kind), sort_keys=False, allow_unicode=True)
    text = f"---\n{front}---\n\n![{kind}: the score over the run]({PICTURE})\n\n{markdown(found)}"
    write_whole(out / "README.md", text)


def _front(found: Digest, kind: str) -> dict[str, object]:
    """The metadata that the hub reads from a card."""
    environment = found.run.config.get("environment")
    name = environment.get("name") if isinstance(environment, dict) else None
    tags = [
        "forge-env",
        *(["reinforcement-learning"] if kind == "model" else []),
        *([str(name).partition(":")[0]] if name else []),
    ]
    if kind == "run":
        return {"tags": tags}
    model = found.run.config.get("model")
    base = str(model.get("path", "")) if isinstance(model, dict) else ""
    on_hub = base.count("/") == 1 and not base.startswith((".", "/", "~")) and not Path(base).exists()
    known = {"base_model": base} if on_hub else {}
    return {"library_name": "transformers", "pipeline_tag": "text-generation", **known, "tags": tags}
