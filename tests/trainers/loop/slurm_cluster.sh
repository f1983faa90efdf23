#!/bin/bash
# A real Slurm on this machine, on loopback addresses only: munged, slurmctld, and two slurmd, each on a make-believe node
# with a host name of its own (nodeN is 127.0.0.N+1).
#   slurm_cluster.sh up FOLDER | down FOLDER      needs root and Debian's slurmctld, slurmd, slurm-client, munge
set -euo pipefail
RUN=$2
export SLURM_CONF=$RUN/slurm.conf
case $1 in
up)
  mkdir -p "$RUN/state" "$RUN/log"
  printf '127.0.0.1 localhost %s\n127.0.0.2 node1\n127.0.0.3 node2\n' "$(hostname)" >"$RUN/hosts"
  cat >"$SLURM_CONF" <<C
ClusterName=loopback
SlurmctldHost=$(hostname)(127.0.0.1)
CommunicationParameters=NoCtldInAddrAny
AuthType=auth/munge
AuthInfo=socket=$RUN/munge/socket
SlurmUser=root
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
MpiDefault=none
SlurmctldPidFile=$RUN/slurmctld.pid
SlurmdPidFile=$RUN/slurmd.%n.pid
StateSaveLocation=$RUN/state
SlurmdSpoolDir=$RUN/spool.%n
SlurmctldLogFile=$RUN/log/slurmctld.log
SlurmdLogFile=$RUN/log/slurmd.%n.log
SlurmdParameters=config_overrides
KillWait=10
InactiveLimit=0
NodeName=node1 NodeAddr=127.0.0.2 Port=17001 CPUs=2 RealMemory=8000 State=UNKNOWN
NodeName=node2 NodeAddr=127.0.0.3 Port=17002 CPUs=2 RealMemory=8000 State=UNKNOWN
PartitionName=debug Nodes=node[1-2] Default=YES MaxTime=60 State=UP
C
  install -d -o munge -g munge -m 0755 "$RUN/munge"
  head -c 1024 /dev/urandom >"$RUN/munge/key"
  chown munge: "$RUN/munge/key"
  chmod 400 "$RUN/munge/key"
  # each daemon is started here and its id kept, so that `down` ends these and no others
  setpriv --reuid=munge --regid=munge --clear-groups munged --foreground --force --socket="$RUN/munge/socket" \
    --key-file="$RUN/munge/key" --pid-file="$RUN/munge/pid" --log-file="$RUN/munge/log" \
    --seed-file="$RUN/munge/seed" </dev/null >"$RUN/log/munged.out" 2>&1 &
  echo $! >>"$RUN/pids"
  for _ in $(seq 50); do [ -S "$RUN/munge/socket" ] && break; sleep 0.1; done
  slurmctld -D </dev/null >"$RUN/log/slurmctld.out" 2>&1 &
  echo $! >>"$RUN/pids"
  for n in 1 2; do
    unshare --uts --mount sh -c 'hostname "$0"; mount --bind "$1" /etc/hosts; exec slurmd -D' "node$n" "$RUN/hosts" \
      </dev/null >"$RUN/log/slurmd$n.out" 2>&1 &
    echo $! >>"$RUN/pids"
  done
  for _ in $(seq 150); do [ "$(sinfo -h -N -t idle -o %N 2>/dev/null | sort -u | wc -l)" = 2 ] && exit 0; sleep 0.2; done
  sinfo
  exit 1
  ;;
down) tac "$RUN/pids" | while read -r pid; do kill "$pid" 2>/dev/null || true; done ;;
esac
