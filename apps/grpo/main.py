"""`python -m apps.grpo.main --config apps/grpo/qwen3_1_7b.yaml [--a.b VALUE | a.b=VALUE ...]` is `forge-env train`."""

from __future__ import annotations

import sys

from forge_env.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main(["train", *sys.argv[1:]]))
