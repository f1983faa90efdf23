#!/usr/bin/env bash
# Runs tests: scripts/test.sh core|rest|all [PYTEST_OPTIONS...]
#   core  fast tests, and slow ones marked `core`: `make test`
#   rest  all others, and third-party conformance suites: `make test-rest`
#   all   both: `make test-all`
# As root on Debian, it installs what is missing (Docker, Chromium, for "rest" an ssh server), and starts dockerd, which
# it stops at the end. On a terminal it asks before; YES=1 agrees beforehand. Tests that lack something are listed as
# not run, which fails in CI.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/outside.sh

CORE="core or not slow"
part=$1
shift
case "$part" in
  core) select=(-m "$CORE") ;;
  rest) select=(-m "not ($CORE)") ;;
  all) select=() ;;
  *)
    echo "test: \"$part\" is unknown; use core, rest or all" >&2
    exit 2
    ;;
esac

left_out=()
leave_out() {
  left_out+=("$1")
  echo "test: *** left out: $1 ***" >&2
}

daemon_answers() { docker version --format '{{.Server.Version}}' >/dev/null 2>&1; }

dockerd_pid=
stop_dockerd() {
  [ -n "$dockerd_pid" ] || return 0
  kill "$dockerd_pid" 2>/dev/null || true
  wait "$dockerd_pid" 2>/dev/null || true
}

start_dockerd() {
  local log="${DOCKERD_LOG:-/var/log/forge-env-dockerd.log}" waited=0
  if ! command -v dockerd >/dev/null; then
    install_packages docker.io >"$log" 2>&1 || {
      tail -n 5 "$log" >&2
      return 1
    }
    if daemon_answers; then return 0; fi # the package may have started it
  fi
  echo "test: starting dockerd (log: $log)"
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
  what="start dockerd, and stop it at the end"
  command -v dockerd >/dev/null || what="install docker.io with apt-get and $what"
  if can_install && agreed test "$what" && start_dockerd; then
    :
  elif [ "${CI:-}" = true ]; then
    echo "test: Docker is not running and could not be started; CI runs every test or fails" >&2
    exit 1
  else
    leave_out "tests of the Docker engine (to add them: apt-get install docker.io; dockerd &)"
  fi
fi

# Installs the Debian packages $2 if the program $1 is missing; $3 names the tests that need them.
need() {
  [ ! -x "$1" ] || return 0
  # shellcheck disable=SC2086 # several packages
  if can_install && agreed test "install $2 with apt-get" && install_packages $2 >/dev/null 2>&1; then return 0; fi
  leave_out "$3 (to add them: apt-get install $2)"
}

need /usr/bin/chromium chromium "tests in a browser"
if [ "$part" != core ]; then
  need /usr/sbin/sshd "openssh-server openssh-client" "the test of Docker daemons behind ssh"
fi

failures=.pytest_cache/v/cache/lastfailed
whole=
if [ $# = 0 ] || [ "${CI:-}" = true ]; then whole=yes; fi

# Third-party suites can't share an environment with vLLM: they run in separate environments, and first, so that the
# summary of pytest comes last.
kits_status=0
if [ "$part" != core ] && [ -n "$whole" ]; then
  .venv/bin/python -m benchmarks conformance --ci || kits_status=$?
fi
status=0
# Four workers; tests/conftest.py starts one with the heavy tests. With a debugger: ARGS="-n 0 --pdb ..."
[ -z "$whole" ] || rm -f "$failures"
.venv/bin/python -m pytest -n 4 "${select[@]}" "$@" || status=$?
# On a busy machine a whole pass can fail by chance: up to three failed tests are run again, and named as flaky if they
# pass then.
flaky=
if [ -n "$whole" ] && [ "$status" = 1 ] && [ -f "$failures" ]; then
  failed=$(grep -c '": true' "$failures" || true)
  if [ "$failed" -ge 1 ] && [ "$failed" -le 3 ]; then
    flaky=$(sed -n 's/^ *"\(.*\)": true,\{0,1\}$/\1/p' "$failures")
    echo "test: running $failed failed tests again"
    if .venv/bin/python -m pytest -n 0 --last-failed "${select[@]}" "$@"; then status=0; else flaky=; fi
  fi
fi
[ -z "$flaky" ] || printf 'test: *** flaky, passed only when run again: %s ***\n' "$flaky"
for each in "${left_out[@]}"; do echo "test: left out: $each"; done
[ "$part" != core ] || echo "test: left out: slow tests and third-party suites (to add them: make test-rest)"
exit $((status ? status : kits_status))
