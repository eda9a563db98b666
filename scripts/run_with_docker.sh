#!/usr/bin/env bash
# A series of experiments on one machine with `docker run`, without Slurm.
#
#   scripts/run_with_docker.sh launch.image=IMAGE benchmark=resnet scale=8xH100 launch.experiments=5
#
# All options are those of scripts/run.sub, --dry-run included; the variable CONT may name the image too, and
# MLPERF_GPUS the GPUs, as in `docker run --gpus`.
set -euo pipefail
command -v docker >/dev/null || [[ " $* " == *" --dry-run "* ]] || {
  echo "run_with_docker.sh: docker is not installed; scripts/run.sub runs without a container" >&2
  exit 2
}
exec bash "$(dirname "${BASH_SOURCE[0]}")/run.sub" launch.container=docker "$@"
