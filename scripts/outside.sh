# Sourced by setup.sh and test.sh: what they install or start outside the clone, and who agreed to it.

# Returns whether to do what the arguments describe: asks on a terminal, agrees with YES=1 or without a terminal.
agreed() {
  printf '%s\n' "$1 would $2 (outside this folder)."
  if [ -n "${YES:-}" ] || [ "${CI:-}" = true ] || ! [ -t 0 ]; then return 0; fi
  local answer
  read -r -p "Go on? [y/N; YES=1 agrees beforehand] " answer
  [[ "$answer" == [yY]* ]]
}

install_packages() {
  { apt-get update -qq && apt-get install -y -qq --no-install-recommends "$@"; } </dev/null
}

can_install() { [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; }
