"""The inside of a virtual machine of `e2b_api.py`: a writable root of its own, with every right."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from sandboxes.runner import kernel, root


def main(plan: dict[str, Any]) -> None:
    kernel.die_with_parent()
    kernel.mount(None, "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    folder = plan["folder"]
    layers = f"lowerdir={plan['root']},upperdir={folder}/upper,workdir={folder}/work"
    kernel.mount("overlay", f"{folder}/merged", "overlay", 0, layers)
    root.mount_kernel_folders(f"{folder}/merged")
    root.pivot(f"{folder}/merged")
    os.execve(plan["argv"][0], plan["argv"], plan["env"])


main(json.loads(sys.argv[1]))
