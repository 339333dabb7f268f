#!/bin/bash
#SBATCH --job-name=iw-opd
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --signal=B:TERM@300

# Trains a recipe with verl on several machines. Copy this file, change the lines above and the settings below, then
# `sbatch slurm.sh`. Submit it again to go on after the time limit. All machines must see the folders under the same paths.
: "${VENV:=/shared/venv}"
: "${RUN:=/shared/runs/iw-opd-math-seed0}"
: "${RECIPE:=paper/qwen3-1.7b-from-qwen3-30b-a3b-instruct-2507-iw-opd-math}"
: "${OPTIONS:=--cluster.teacher-tensor-parallel 2}" # more settings, as words
: "${PORT:=6379}"
: "${PATIENCE:=600}" # seconds until Ray must run on all machines

set -euo pipefail
# shellcheck source=/dev/null
source "$VENV/bin/activate"
nodes=$SLURM_JOB_NUM_NODES
gpus=$SLURM_GPUS_ON_NODE
read -r head < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
export RAY_ADDRESS=$head:$PORT
ray get-auth-token --generate >/dev/null # in ~/.ray/auth_token: Ray's machines must show it to each other

training=
# Slurm's SIGTERM, five minutes before the time limit: srun passes it on to the launcher.
trap 'if [ -n "$training" ]; then kill -TERM "$training"; else exit 143; fi' TERM
trap 'kill $(jobs -p) 2>/dev/null || true; wait' EXIT # Ray on all machines; it may print errors while it ends

wait_for() { # until Ray runs on so many machines; $2: how many sruns start it
  local found
  until found=$(ray status 2>/dev/null | grep -cE '^ +1 node_') && [ "$found" -ge "$1" ]; do
    if [ "$SECONDS" -ge "$PATIENCE" ] || [ "$(jobs -pr | wc -l)" -lt "$2" ]; then
      echo "slurm.sh: Ray runs on ${found:-0} of $1 machines after $SECONDS s; its words are above" >&2
      exit 1
    fi
    sleep 2
  done
}

ray_start=(ray start --num-cpus="$SLURM_CPUS_PER_TASK" --num-gpus="$gpus" --block)
srun --nodes=1 --ntasks=1 --nodelist="$head" --overlap "${ray_start[@]}" --head --port="$PORT" --include-dashboard=false &
wait_for 1 1
if [ "$nodes" -gt 1 ]; then
  others=$((nodes - 1))
  srun --nodes=$others --ntasks=$others --exclude="$head" --overlap "${ray_start[@]}" --address="$RAY_ADDRESS" &
  wait_for "$nodes" 2
fi

target=("$RECIPE" --out "$RUN")
if [ -f "$RUN/run.json" ]; then target=("$RUN" --resume); fi
read -ra options <<<"$OPTIONS"
srun --nodes=1 --ntasks=1 --nodelist="$head" --overlap \
  iwopd train "${target[@]}" --engine verl --nodes "$nodes" --gpus-per-node "$gpus" "${options[@]}" &
training=$!
code=0
wait "$training" || code=$?
while kill -0 "$training" 2>/dev/null; do # a signal ended the waiting, not the training
  code=0
  wait "$training" || code=$?
done
exit "$code"
