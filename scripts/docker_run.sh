#!/usr/bin/env bash
# Runs `docker run` with the resource limits of a training, as far as this machine permits: scripts/container.sh.
#
#   scripts/docker_run.sh [OPTION OF docker run ...] IMAGE PROGRAM ...
#
# A daemon may raise limits. Podman, and a rootless daemon, have the limits of the caller; there a higher one would end
# the container before it starts. `mlperf-suite doctor` inside of the container says which limit is too low.
set -euo pipefail

# Prints the limit for docker's --ulimit: the wanted one, or the hard limit of this shell if it may not be raised.
#   $1 letter of `ulimit`; $2 wanted, in the unit of `ulimit`, or unlimited; $3 bytes of that unit, 1 for a number
within_reach() {
  local limit=$2
  # shellcheck disable=SC3045 # bash has -H
  (ulimit "-H$1" "$limit") 2>/dev/null || limit=$(ulimit "-H$1")
  if [[ $limit == unlimited ]]; then echo -1; else echo $((limit * $3)); fi
}

memlock=-1 stack=67108864 nofile=1048576
if docker info --format '{{.Host.Security.Rootless}}' >/dev/null 2>&1 ||   # a field that only podman has
  [[ $(docker info --format '{{.SecurityOptions}}' 2>/dev/null) == *rootless* ]]; then
  memlock=$(within_reach l unlimited 1024) stack=$(within_reach s 65536 1024) nofile=$(within_reach n 1048576 1)
fi
exec docker run --ulimit "memlock=$memlock" --ulimit "stack=$stack" --ulimit "nofile=$nofile:$nofile" "$@"
