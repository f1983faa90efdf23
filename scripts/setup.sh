#!/usr/bin/env bash
# Creates .venv with the pinned packages and forge-env itself. Does nothing if nothing changed.
#   STACK=cpu|gpu|platform  what to install: a training stack (default: gpu if nvidia-smi lists one, else cpu),
#                           or the platform without torch
#   STACK=rocm              for AMD GPUs: packages missing beside vLLM's ROCm build in PYTHON or VENV (docs/rocm.md)
#   PYTHON=...              the base interpreter (default: python3.11, else python3)
#   VENV=...                folder of the environment (default: .venv)
#   YES=1                   install missing Debian packages (as root) without asking on a terminal
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/outside.sh

UV_VERSION=0.13.9
VENV=${VENV:-.venv}

say() { printf '%s\n' "setup: $*"; }
die() { printf '%s\n' "setup: $*" >&2; exit 1; }

choose_stack() {
  if [ -n "${STACK:-}" ]; then
    [ -f "requirements/$STACK.txt" ] || die "STACK=$STACK is unknown; use cpu, gpu, rocm or platform"
  elif command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q '^GPU'; then
    STACK=gpu
  else
    STACK=cpu
  fi
}

# vLLM's ROCm build is made for a later Python than the pinned CPU build of torch.
python_fits() { "$1" -c 'import sys; sys.exit(not ((3, 11) <= sys.version_info[:2] <= (3, 12 if sys.argv[1] == "rocm" else 11)))' "$STACK" 2>/dev/null; }

choose_python() {
  local candidate candidates=(python3.11 python3 /usr/bin/python3.11 /usr/bin/python3)
  if [ -n "${PYTHON:-}" ]; then candidates=("$PYTHON"); fi
  for candidate in "${candidates[@]}"; do
    if python_fits "$candidate"; then
      PYTHON=$candidate
      return
    fi
  done
  die "Python 3.11 is needed (the pinned packages are built for it). On Debian: apt-get install python3.11 python3-venv. Or say PYTHON=/path/to/python3.11"
}

digest() { cat pyproject.toml "requirements/$STACK.txt" scripts/setup.sh | sha256sum | cut -d' ' -f1; }

# Creates a virtual environment with pip, using whichever of ensurepip, pip and uv is available.
make_venv() {
  local seeing=() # makes PYTHON's packages visible
  if [ "$STACK" = rocm ]; then seeing=(--system-site-packages); fi
  if "$PYTHON" -c 'import ensurepip' 2>/dev/null; then
    "$PYTHON" -m venv --clear "${seeing[@]}" "$VENV"
  elif "$PYTHON" -m pip --version >/dev/null 2>&1; then
    "$PYTHON" -m venv --clear --without-pip "${seeing[@]}" "$VENV"
    "$PYTHON" -m pip --python "$VENV/bin/python" install --quiet pip
  elif command -v uv >/dev/null; then
    uv venv --quiet --clear --seed --python "$PYTHON" "${seeing[@]}" "$VENV"
  elif can_install && agreed setup "install python3-venv with apt-get"; then
    install_packages python3-venv >/dev/null || die "apt-get could not install python3-venv"
    "$PYTHON" -m venv --clear "${seeing[@]}" "$VENV"
  else
    die "this Python can't make virtual environments. On Debian: apt-get install python3-venv"
  fi
}

# uv does not read pip's settings: pass on the package sources configured for pip.
pip_setting() { "$VENV/bin/python" -m pip config get "$1" 2>/dev/null | tr -s ' \n' ',' | sed 's/,$//' || true; }

pass_on_pip_settings() {
  local links index
  links="$(printf '%s' "${PIP_FIND_LINKS:-}" | tr -s ' \n' ',')"
  [ -n "$links" ] || links="$(pip_setting global.find-links)"
  if [ -z "${UV_FIND_LINKS:-}" ] && [ -n "$links" ]; then export UV_FIND_LINKS="$links"; fi
  index="${PIP_INDEX_URL:-$(pip_setting global.index-url)}"
  if [ -z "${UV_DEFAULT_INDEX:-}${UV_INDEX_URL:-}" ] && [ -n "$index" ]; then export UV_DEFAULT_INDEX="$index"; fi
  # Private certificate authorities are in the system's store, not in uv's.
  if [ -f /etc/ssl/certs/ca-certificates.crt ]; then export UV_SYSTEM_CERTS="${UV_SYSTEM_CERTS:-true}"; fi
}

# The CPU build of torch is not on PyPI: if no configured source has it, let uv select torch's index.
torch_backend() {
  [ "$STACK" = cpu ] || return 0
  local pin
  pin="$(grep -E '^torch==' requirements/cpu.txt)"
  "$VENV/bin/uv" pip install --quiet --dry-run --reinstall --no-deps --python "$VENV/bin/python" "$pin" >/dev/null 2>&1 || echo "--torch-backend=cpu"
}

# vLLM's CPU build needs a system library that Debian's slim images lack.
libnuma() {
  [ "$STACK" = cpu ] || return 0
  "$PYTHON" -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null && return 0
  if can_install && agreed setup "install libnuma1 with apt-get"; then
    install_packages libnuma1 >/dev/null || die "apt-get could not install libnuma1"
  else
    say "*** libnuma.so.1 is missing, which vLLM needs: training will not start. On Debian: apt-get install libnuma1 ***"
  fi
}

# For AMD GPUs the installed torch and vLLM are used: no index has builds that match the pinned versions.
rocm_is_there() {
  "$VENV/bin/python" -c 'import importlib.metadata as m, torch; m.version("vllm"); raise SystemExit(not torch.version.hip)' 2>/dev/null ||
    die "STACK=rocm adds to an environment that has vLLM for ROCm and the torch it came with, and $VENV has not. Say PYTHON=/path/to/python (its packages are used) or VENV=/path/to/environment (see docs/rocm.md)"
}

choose_stack
choose_python
stamp="$VENV/.forge-env-setup"
wanted="$STACK $(digest)"
if [ -x "$VENV/bin/forge-env" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
  exit 0
fi

same_stack() { [ "$STACK" = rocm ] || [ "$(cut -d' ' -f1 "$stamp" 2>/dev/null)" = "$STACK" ]; } # keep an environment that has vLLM for ROCm
if [ ! -x "$VENV/bin/python" ] || ! python_fits "$VENV/bin/python" || ! same_stack; then
  say "making $VENV with $("$PYTHON" --version)"
  make_venv
fi
rm -f "$stamp"
if [ "$STACK" = rocm ]; then rocm_is_there; fi
libnuma
say "installing the pinned packages ($STACK) into $VENV"
"$VENV/bin/python" -m pip install --quiet "uv==$UV_VERSION"
pass_on_pip_settings
# shellcheck disable=SC2046 # empty or one word
"$VENV/bin/uv" pip install --python "$VENV/bin/python" --no-deps $(torch_backend) -r "requirements/$STACK.txt"
"$VENV/bin/uv" pip install --quiet --python "$VENV/bin/python" --no-deps -e .
printf '%s\n' "$wanted" >"$stamp"
say "ready: $VENV/bin/forge-env; to activate the environment: . $VENV/bin/activate"
