#!/usr/bin/env bash
# Resolves pyproject.toml into requirements/*.txt: one version per package, no registry addresses. Pinned versions that
# still fit stay; `make pins ARGS=--upgrade` selects the newest. Run it after changing a dependency, then `make test`.
set -euo pipefail
cd "$(dirname "$0")/.."
upgrade=("$@")

compile() { # compile STACK --extra NAME...
  local out="requirements/$1.txt"
  .venv/bin/uv pip compile pyproject.toml --quiet "${@:2}" "${upgrade[@]}" --python-version 3.11 \
    --python-platform x86_64-manylinux_2_28 --no-header --no-annotate --output-file "$out" >/dev/null
  sed -i "1i # Pinned set for \`make setup STACK=$1\` (Python 3.11). Made by scripts/pins.sh; don't edit." "$out"
}

# Packages for tests and development besides the training stack; without `verifiers`, which conflicts with vLLM.
extras=(--extra dev --extra wandb --extra data --extra mcp --extra openenv --extra kubernetes)

compile platform
UV_FIND_LINKS="${UV_FIND_LINKS:-${PIP_FIND_LINKS:-}}" compile cpu --extra train-cpu "${extras[@]}" \
  --overrides <(printf "torchvision ; sys_platform == 'never'\n")
unset UV_FIND_LINKS # a CPU wheel of torch there would take precedence
compile gpu --extra train-gpu "${extras[@]}"
compile rocm --extra train-rocm --excludes <(printf 'torch\ntriton\n') --constraint requirements/gpu.txt
grep -q "^torch==.*+cpu$" requirements/cpu.txt || {
  echo "pins: no CPU build of torch found; set UV_FIND_LINKS to a place that has it" >&2
  exit 1
}
