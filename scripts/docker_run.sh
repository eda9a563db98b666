#!/usr/bin/env bash
# Runs `docker run` with the resource limits of a training, as far as this machine permits: scripts/container.sh.
#
#   scripts/docker_run.sh [--gpus GPUS] [OPTION OF docker run ...] IMAGE PROGRAM ...
#
# A daemon may raise limits. Podman, and a rootless daemon, have the limits of the caller; there a higher one would end
# the container before it starts. `mlperf-suite doctor` inside of the container says which limit is too low.
set -euo pipefail

# Prints the limit for docker's --ulimit: the wanted one, or the hard limit of this shell if it may not be raised.
#   $1 letter of `ulimit`; $2 wanted, in the unit of `ulimit`, or unlimited; $3 bytes of that unit, 1 for a number
within_reach() {
  local limit=$2
  (ulimit "-$1" "$limit") 2>/dev/null || limit=$(ulimit "-H$1")
  if [[ $limit == unlimited ]]; then echo -1; else echo $((limit * $3)); fi
}

# Prints podman's --device options, one word a line, for GPUs as docker's --gpus takes them: all, a number, or device=0,1.
gpu_devices() {
  local gpus=${1//\"/} name
  case $gpus in
    all) set -- all ;;
    device=*) IFS=, read -ra names <<<"${gpus#device=}"; set -- "${names[@]}" ;;
    *[!0-9]* | '') echo "docker_run.sh: --gpus $1: with podman give all, a number, or device=0,1" >&2; return 2 ;;
    *) mapfile -t names < <(seq 0 $((gpus - 1))); set -- "${names[@]}" ;;
  esac
  for name; do printf '%s\n' --device "nvidia.com/gpu=$name"; done
}

memlock=-1 stack=67108864 nofile=1048576
podman="" processes=()
! docker info --format '{{.Host.Security.Rootless}}' >/dev/null 2>&1 || podman=1   # a field that docker has not
if [[ -n $podman || $(docker info --format '{{.SecurityOptions}}' 2>/dev/null) == *rootless* ]]; then
  memlock=$(within_reach l unlimited 1024) stack=$(within_reach s 65536 1024) nofile=$(within_reach n 1048576 1)
  # Podman's own default for processes may be above the caller's limit too. It lowers this limit of itself to pid_max.
  processes=(--ulimit "nproc=$(within_reach u "$(</proc/sys/kernel/pid_max)" 1)")
fi
options=(--ulimit "memlock=$memlock" --ulimit "stack=$stack" --ulimit "nofile=$nofile:$nofile" "${processes[@]}")
# Podman finds GPUs through the container device interface: nvidia-ctk cdi generate.
if [[ $1 == --gpus ]]; then
  if [[ -n $podman ]]; then
    devices=$(gpu_devices "$2")
    mapfile -t -O "${#options[@]}" options <<<"$devices"
  else
    options+=(--gpus "$2")
  fi
  shift 2
fi
exec docker run "${options[@]}" "$@"
