#!/usr/bin/env bash
#SBATCH --job-name=mlperf
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=TERM@300
#
# The one entry to a launched run of any workload.
#
#   sbatch -N8 --ntasks-per-node=8 scripts/run_and_time.sh benchmark=bert scale=64xH100 launch.experiments=10
#
# In an allocation, outside of any step, and with --dry-run it is the driver of a series of experiments (run.sub).
# Inside a step, in a container or on bare metal it is one rank, or the ranks of one machine. Options:
# docs/launching.md.
set -euo pipefail

die() { echo "run_and_time.sh: $*" >&2; exit 2; }

# Slurm runs a copy of this script from its spool folder; the repository is where the job was submitted, or is named.
find_root() {
  local here
  here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
  for root in "${MLPERF_SUITE_ROOT:-}" "$here/.." "${SLURM_SUBMIT_DIR:-}"; do
    if [[ -n $root && -f $root/scripts/run.sub && -d $root/common ]]; then
      (cd "$root" && pwd)
      return
    fi
  done
  die "the repository is not where the job was submitted (${SLURM_SUBMIT_DIR:-not a Slurm job}); set MLPERF_SUITE_ROOT"
}

# The batch shell of a job has PROCID 0 and LOCALID 0 like a rank, but no step of its own; Slurm's own steps (batch,
# extern, interactive) have numbers from 0xfffffff0 on.
in_a_step() {
  [[ ${SLURM_STEP_ID:-} =~ ^[0-9]+$ ]] && ((SLURM_STEP_ID < 0xfffffff0))
}

MLPERF_SUITE_ROOT=$(find_root)
export MLPERF_SUITE_ROOT

# A dry run is the driver's, wherever it happens.
if [[ " $* " == *" --dry-run "* ]] ||
  { [[ -n ${SLURM_JOB_ID:-} && -z ${MLPERF_SUITE_DRIVER:-} ]] && ! in_a_step; }; then
  exec bash "$MLPERF_SUITE_ROOT/scripts/run.sub" "$@"
fi

# NVIDIA's hook for enroot sets part of torchrun's variables, without the number of ranks on a node: Slurm's are whole.
if in_a_step && [[ -z ${LOCAL_WORLD_SIZE:-} ]]; then
  unset RANK WORLD_SIZE LOCAL_RANK
fi

# shellcheck source=scripts/python.sh
source "$MLPERF_SUITE_ROOT/scripts/python.sh"
if [[ -n ${MLPERF_GATE:-} ]]; then   # the driver lets the ranks of all instances begin together
  echo "$MLPERF_GATE"
  read -r || die "the driver was stopped before all instances had started"
  exec </dev/null
fi
ulimit -Sn "$(ulimit -Hn)" 2>/dev/null || true   # many readers and many peers need many files
exec "$PYTHON" -m common.cli task "$@"
