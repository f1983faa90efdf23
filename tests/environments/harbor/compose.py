"""Compose as Docker's plugin, for machines that only have version 1 (Debian's docker-compose).

Harbor asks for version 2. What version 1 doesn't know of the files and flags that Harbor writes is left out, and
changes nothing here: labels of SELinux, and waiting for health checks, of which there are none. What it can't do in a
container without a terminal is done by Docker itself.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

METADATA = {"SchemaVersion": "0.1.0", "Vendor": "tests", "Version": "1", "ShortDescription": "Compose"}


def understood(path: str) -> str:
    """A compose file as version 1 takes it."""
    if not path.endswith(".json"):
        return path
    content = json.loads(Path(path).read_text())
    for service in content.get("services", {}).values():
        for volume in service.get("volumes", []):
            volume.get("bind", {}).pop("selinux", None)
    descriptor, name = tempfile.mkstemp(suffix=".json", dir=os.environ["COMPOSE_FILES"])
    with os.fdopen(descriptor, "w") as file:
        json.dump(content, file)
    return name


def main(words: list[str]) -> None:
    """Run version 1 with the same words."""
    if words[:1] == ["docker-cli-plugin-metadata"]:
        print(json.dumps(METADATA))
        return
    words = [word for word in words[1:] if word != "--wait"]
    project = words[words.index("--project-name") + 1]
    for verb in ("exec", "cp"):
        if verb in words:
            rest = words[words.index(verb) + 1 :]
            named = [f"{project}_main_1{word.removeprefix('main')}" if is_main(word) else word for word in rest]
            os.execvp("docker", ["docker", verb, *("-i" if word == "-T" else word for word in named)])
    words = [understood(word) if before == "-f" else word for before, word in zip(["", *words], words, strict=False)]
    os.execvp("docker-compose", ["docker-compose", *words])


def is_main(word: str) -> bool:
    """Whether it names the only service, or a file in it."""
    return word == "main" or word.startswith("main:")


if __name__ == "__main__":
    main(sys.argv[1:])
