#!/usr/bin/env bash
# Runs all tests. Tests of the Docker engine need Docker: as root on Debian, it is installed and started if it is not
# running, and stopped at the end. Otherwise these tests are reported as not run, which fails in CI. An ssh server is
# installed too; only the test of daemons behind ssh:// starts it.
set -euo pipefail
cd "$(dirname "$0")/.."

dockerd_pid=
daemon_answers() { docker version --format '{{.Server.Version}}' >/dev/null 2>&1; }

install_packages() {
  apt-get update -qq </dev/null && apt-get install -y -qq --no-install-recommends "$@" </dev/null
}

stop_dockerd() {
  [ -n "$dockerd_pid" ] || return 0
  kill "$dockerd_pid" 2>/dev/null || true
  wait "$dockerd_pid" 2>/dev/null || true
}

start_dockerd() {
  local log="${DOCKERD_LOG:-/var/log/forge-env-dockerd.log}" waited=0
  if ! command -v dockerd >/dev/null; then
    echo "test: Docker is not running; installing docker.io with apt-get"
    install_packages docker.io >"$log" 2>&1 || {
      tail -n 5 "$log" >&2
      return 1
    }
    if daemon_answers; then return 0; fi # the package may have started it
  fi
  echo "test: starting dockerd (stopped again at the end; its log is $log)"
  dockerd >"$log" 2>&1 </dev/null &
  dockerd_pid=$!
  trap stop_dockerd EXIT
  until daemon_answers; do
    if ! kill -0 "$dockerd_pid" 2>/dev/null || [ $((waited += 1)) -gt 60 ]; then
      tail -n 5 "$log" >&2
      return 1
    fi
    sleep 1
  done
}

if ! daemon_answers; then
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null && start_dockerd; then
    :
  elif [ "${CI:-}" = true ]; then
    echo "test: Docker is not running and could not be started; CI runs every test or fails" >&2
    exit 1
  else
    echo "test: *** Docker is not running: tests marked 'docker' are NOT RUN (start it, or run as root on Debian) ***" >&2
  fi
fi

if [ "$(id -u)" = 0 ] && [ ! -x /usr/sbin/sshd ] && command -v apt-get >/dev/null; then
  install_packages openssh-server openssh-client >/dev/null 2>&1 || echo "test: sshd is not installed" >&2
fi

# Tests marked 'browser' open the pages of `forge-env view` in Chromium.
if [ "$(id -u)" = 0 ] && [ ! -x /usr/bin/chromium ] && command -v apt-get >/dev/null; then
  install_packages chromium >/dev/null 2>&1 || echo "test: Chromium is not installed: tests marked 'browser' are not run" >&2
fi

# Third-party conformance suites can't share an environment with vLLM: they run in separate environments, and first, so
# that the summary of the whole test suite is the last line.
kits_status=0
if [ $# = 0 ] || [ "${CI:-}" = true ]; then
  .venv/bin/python -m benchmarks conformance --ci || kits_status=$?
fi
status=0
# Four workers; one starts with the heavy tests and two end with them (tests/conftest.py). To use a debugger:
# make test ARGS="-n 0 --pdb ..."
.venv/bin/python -m pytest -n 4 "$@" || status=$?
exit $((status ? status : kits_status))
