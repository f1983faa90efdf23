#!/usr/bin/env bash
# Tests against other projects, in environments of their own. The real openenv-core and verifiers pin other versions of
# openai and mcp than vLLM needs (.venv-interop). SkyPilot agrees with neither, and the schemas of Kubernetes are large
# (.venv-schemas). Agents that are played as programs pin openai, too; inspect_ai and atif, which read what we export, lie
# beside them (.venv-programs). reasoning_gym, TextArena and MiniGrid are only tried here. Harbor wants Python 3.12 (PYTHON312=...)
# and Compose (.venv-harbor).
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
  [ -x "$venv/bin/python" ] || "$uv" venv -q --python "${python:-3.11}" "$venv"
  # shellcheck disable=SC2086
  "$uv" pip install -q --python "$venv/bin/python" $packages "${pytest[@]}"
  "$venv/bin/python" -m pytest "$@"
}

peers="-e .[openenv,verifiers,reasoning_gym] openenv-core==0.3.0 textarena==0.7.4 minigrid==3.2.0"
if [ $# != 0 ]; then
  run .venv-interop "$peers" "$@"
  exit
fi
run .venv-interop "$peers" tests/forge_env/serve/test_openenv_core.py tests/environments/test_verifiers.py \
  tests/environments/test_foreign.py
run .venv-programs "-e . pip mini-swe-agent==2.4.6 openai-agents==0.24.0 pydantic-ai-slim[openai]==2.68.0 \
  smolagents[openai]==1.26.0 langgraph==1.2.22 langchain-openai==1.7.3 atif==1.8.0 inspect-ai==0.3.285" \
  tests/forge_env/gateway/test_real_programs.py tests/forge_env/test_interchange.py
agents=.node-programs
if command -v npm >/dev/null && npm install --silent --no-audit --no-fund --omit=optional --prefix "$agents" \
  node@22.23.3 @qwen-code/qwen-code@0.24.4 && "$agents/node_modules/node/bin/node" --version; then
  FORGE_ENV_NODE_MODULES="$PWD/$agents/node_modules" run .venv-programs "-e ." tests/forge_env/gateway/test_node_program.py
else
  echo "NOT RUN: an agent in Node, which needs npm and its packages node and @qwen-code/qwen-code"
fi
newer="${PYTHON312:-$(command -v python3.12 || true)}"
if [ -n "$newer" ] && "$newer" -c "" 2>/dev/null && command -v docker-compose >/dev/null; then
  python="$newer" run .venv-harbor "-e . harbor==0.24.0" tests/environments/harbor/test_real_harbor.py
else
  echo "NOT RUN: harbor run, which needs Python 3.12 (PYTHON312=/path/to/python) and docker-compose"
fi
home=$(mktemp -d) # SkyPilot writes there
trap 'rm -rf "$home"' EXIT
UV_CACHE_DIR="${UV_CACHE_DIR:-$HOME/.cache/uv}" HOME="$home" run .venv-schemas \
  "-e . kubernetes-validate==1.37.0 skypilot==0.14.1" tests/sandboxes/test_pod_schema.py tests/forge_env/job/test_files_schema.py
