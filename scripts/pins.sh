#!/usr/bin/env bash
# Resolves pyproject.toml into requirements/*.txt: every package at one version, no registry address.
# Run it after changing a dependency, then `make setup test`.
set -euo pipefail
cd "$(dirname "$0")/.."

compile() { # compile STACK
  local out="requirements/$1.txt"
  {
    echo "# Pinned set for \`make setup\` ($1 training stack, Python 3.11). Made by scripts/pins.sh; don't edit."
    .venv/bin/uv pip compile pyproject.toml --quiet --extra "train-$1" --extra dev --extra wandb --python-version 3.11 \
      --python-platform x86_64-manylinux_2_28 --no-header --no-annotate
  } >"$out.tmp"
  mv "$out.tmp" "$out"
}

for stack in ${*:-cpu gpu}; do
  if [ "$stack" = cpu ]; then
    UV_FIND_LINKS="${UV_FIND_LINKS:-${PIP_FIND_LINKS:-}}" compile cpu
  else
    env -u UV_FIND_LINKS bash -c "$(declare -f compile); compile $stack"
  fi
done
