#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=1 --signal=B:TERM@60
[ $# -gt 0 ] || set -- "${CONFIG_FILE:-grpo/qwen3_1_7b}"
srun --kill-on-bad-exit=0 sh -c 'exec forge-env worker tcp://$(hostname):26700' & workers=$!
forge-env train "$@" --job.kind slurm checkpoint.grace_s=60 & run=$!
trap 'kill -TERM $run' TERM
wait $run; code=$?
while kill -0 $run 2>/dev/null; do wait $run; code=$?; done
kill $workers; wait $workers
exit $code
