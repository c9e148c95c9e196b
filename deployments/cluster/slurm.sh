set -euo pipefail

# On Slurm's notice the stages write checkpoints and end, and Slurm queues this script again.
requeue() {
  if [ -n "${run:-}" ]; then
    kill -INT "$run"
    wait "$run" || true
    while ray job list | grep -q RUNNING; do sleep 1; done
  fi
  alignment down
  scontrol requeue "$SLURM_JOB_ID"
  exit
}
export ALIGNMENT_STACK_DIR=$(mktemp -d)
trap 'alignment down; rm -r "$ALIGNMENT_STACK_DIR"' EXIT
trap requeue USR1

address() {  # of a node in the cluster's network
  getent ahostsv4 "$(scontrol show node "$1" | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p')" | awk 'NR == 1 { print $1 }'
}
on() {  # a step on one node, beside the other steps
  srun --overlap --nodes=1 --ntasks=1 --cpus-per-task="$SLURM_CPUS_ON_NODE" --nodelist="$1" "${@:2}"
}

# Ray on every node, with a token that only this job knows.
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=$(address "${nodes[0]}")
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN=$(python -c 'import secrets; print(secrets.token_hex(32))')
resources="--num-cpus=$SLURM_CPUS_ON_NODE --disable-usage-stats"
on "${nodes[0]}" ray start --head --block --node-ip-address="$head" --port=6379 --dashboard-host="$head" $resources &
until curl --silent --output /dev/null "http://$head:8265/api/version"; do sleep 1; done
for node in "${nodes[@]:1}"; do
  on "$node" ray start --block --address="$head:6379" --node-ip-address="$(address "$node")" $resources &
done

# A Prefect server of this job, unless PREFECT_API_URL names another, and a worker.
export RAY_API_SERVER_ADDRESS="http://$head:8265" ALIGNMENT_AUTOSCALING=1  # nodes may join later
alignment up

env --default-signal=INT alignment run "${recipe[@]}" &
run=$!
wait "$run"
