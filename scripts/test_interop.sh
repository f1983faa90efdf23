#!/usr/bin/env bash
# Tests against the real openenv-core and verifiers, in .venv-interop: they pin other versions of openai and mcp than
# vLLM needs, so they can't share its virtual environment. The schemas of Kubernetes (100 MB) are there too.
set -euo pipefail
cd "$(dirname "$0")/.."

uv="${UV:-uv}"
if ! command -v "$uv" >/dev/null; then
  uv=.venv/bin/uv
fi
PATH="$PATH:$(cd "$(dirname "$(command -v "$uv")")" && pwd)" # verifiers calls uv by name
export PATH

[ -x .venv-interop/bin/python ] || "$uv" venv -q --python 3.11 .venv-interop
"$uv" pip install -q --python .venv-interop/bin/python -e ".[openenv,verifiers]" \
  openenv-core==0.3.0 kubernetes-validate==1.37.0 hypothesis pytest pytest-asyncio pytest-timeout
if [ $# = 0 ]; then set -- tests/forge_env/serve/test_openenv_core.py tests/environments/test_verifiers.py \
  tests/sandboxes/test_pod_schema.py; fi
.venv-interop/bin/python -m pytest "$@"
