#!/usr/bin/env bash
# Tests against other projects, in environments of their own. The real openenv-core and verifiers pin other versions of
# openai and mcp than vLLM needs (.venv-interop). SkyPilot agrees with neither, and the schemas of Kubernetes are large
# (.venv-schemas).
set -euo pipefail
cd "$(dirname "$0")/.."

uv="${UV:-uv}"
if ! command -v "$uv" >/dev/null; then
  uv=.venv/bin/uv
fi
PATH="$PATH:$(cd "$(dirname "$(command -v "$uv")")" && pwd)" # verifiers calls uv by name
export PATH
export SKYPILOT_DISABLE_USAGE_COLLECTION=1
pytest=(hypothesis pytest pytest-asyncio pytest-timeout)

run() { # run VENV "WHAT TO INSTALL" PYTEST_ARGUMENTS...
  local venv=$1 packages=$2
  shift 2
  [ -x "$venv/bin/python" ] || "$uv" venv -q --python 3.11 "$venv"
  # shellcheck disable=SC2086
  "$uv" pip install -q --python "$venv/bin/python" $packages "${pytest[@]}"
  "$venv/bin/python" -m pytest "$@"
}

peers="-e .[openenv,verifiers] openenv-core==0.3.0"
if [ $# != 0 ]; then
  run .venv-interop "$peers" "$@"
  exit
fi
run .venv-interop "$peers" tests/forge_env/serve/test_openenv_core.py tests/environments/test_verifiers.py
home=$(mktemp -d) # SkyPilot writes there
trap 'rm -rf "$home"' EXIT
UV_CACHE_DIR="${UV_CACHE_DIR:-$HOME/.cache/uv}" HOME="$home" run .venv-schemas \
  "-e . kubernetes-validate==1.37.0 skypilot==0.14.1" tests/sandboxes/test_pod_schema.py tests/forge_env/job/test_files_schema.py
