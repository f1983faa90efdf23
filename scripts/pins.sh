#!/usr/bin/env bash
# Resolves pyproject.toml into requirements/*.txt: every package at one version, no registry address.
# Run it after changing a dependency, then `make setup test`.
set -euo pipefail
cd "$(dirname "$0")/.."

compile() { # compile STACK EXTRA...
  local out="requirements/$1.txt"
  {
    echo "# Pinned set for \`make setup STACK=$1\` (Python 3.11). Made by scripts/pins.sh; don't edit."
    .venv/bin/uv pip compile pyproject.toml --quiet ${@:2} --python-version 3.11 \
      --python-platform x86_64-manylinux_2_28 --no-header --no-annotate
  } >"$out.tmp"
  mv "$out.tmp" "$out"
}

compile platform
UV_FIND_LINKS="${UV_FIND_LINKS:-${PIP_FIND_LINKS:-}}" compile cpu --extra train-cpu --extra dev --extra wandb
unset UV_FIND_LINKS # a CPU wheel of torch there would win
compile gpu --extra train-gpu --extra dev --extra wandb
grep -q "^torch==.*+cpu$" requirements/cpu.txt || { echo "pins: no CPU build of torch found; set UV_FIND_LINKS to a place that has it" >&2; exit 1; }
