#!/usr/bin/env bash
# Runs `docker run` as docker's daemon or podman needs it: user, GPUs, and the resource limits of a training.
#
#   scripts/docker_run.sh [--gpus GPUS] [--user USER] [OPTION OF docker run ...] IMAGE PROGRAM ...
#
# The daemon raises limits. Podman has the limits of the caller, where a higher one would end the container before it
# starts; a rootless daemon has its own, which stay as they are. `mlperf-suite doctor` says which limit is too low.
set -euo pipefail

# Prints the limit for docker's --ulimit: the wanted one, or the hard limit of this shell if it may not be raised.
#   $1 letter of `ulimit`; $2 wanted, in the unit of `ulimit`, or unlimited; $3 bytes of that unit, 1 for a number
within_reach() {
  local limit=$2
  (ulimit "-$1" "$limit") 2>/dev/null || limit=$(ulimit "-H$1")
  if [[ $limit == unlimited ]]; then echo -1; else echo $((limit * $3)); fi
}

# Sets options for GPUs as docker's --gpus names them: all, a number, or device=0,1.
set_gpus() {
  local gpus=${1//\"/} names=() name
  case $gpus in
    all) names=(all) ;;
    device=?*) IFS=, read -ra names <<<"${gpus#device=}" ;;
    *[!0-9]* | '') echo "docker_run.sh: GPUs $1: give all, a number, or device=0,1 (MLPERF_GPUS)" >&2; exit 2 ;;
    *) mapfile -t names < <(seq 0 $((10#$gpus - 1))) ;;
  esac
  if [[ $engine == podman ]]; then   # it finds GPUs through the container device interface: nvidia-ctk cdi generate
    for name in "${names[@]}"; do options+=(--device "nvidia.com/gpu=$name"); done
  elif [[ $gpus == device=* ]]; then
    options+=(--gpus "\"$gpus\"")   # docker reads CSV, in which a comma needs quotes
  else
    options+=(--gpus "$gpus")
  fi
}

engine=docker rootless=""
if [[ $(docker --version) == podman* ]]; then
  engine=podman
  [[ $(docker info --format '{{.Host.Security.Rootless}}') != true ]] || rootless=1
else
  [[ $(docker info --format '{{.SecurityOptions}}') != *rootless* ]] || rootless=1
fi

options=()
if [[ $1 == --gpus ]]; then set_gpus "$2"; shift 2; fi
if [[ $1 == --user ]]; then
  # Without root, the caller is root inside, or himself if podman is asked to keep the id.
  case $engine$rootless in
    podman1) options+=(--userns keep-id --user "$2") ;;
    docker1) options+=(--user 0:0) ;;
    *) options+=(--user "$2") ;;
  esac
  shift 2
fi
case $engine$rootless in
  docker) options+=(--ulimit memlock=-1 --ulimit stack=67108864 --ulimit nofile=1048576:1048576) ;;
  podman*)
    nofile=$(within_reach n 1048576 1)
    options+=(--ulimit "memlock=$(within_reach l unlimited 1024)" --ulimit "stack=$(within_reach s 65536 1024)"
      --ulimit "nofile=$nofile:$nofile"
      # Podman lowers its own limit of processes to pid_max, and then asks for more than it has.
      --ulimit "nproc=$(within_reach u "$(</proc/sys/kernel/pid_max)" 1)")
    ;;
esac
exec docker run "${options[@]}" "$@"
