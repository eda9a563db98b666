# shellcheck shell=bash disable=SC2034,SC2154 # the variables that run.sub sets and uses
#
# Sourced: how a program runs in the chosen container. Source, data and results keep their paths inside; of the host
# only the folder of results and that of staged data are writable.
#
# Reads: container, image, job, series, results, staging_dir, read_only, mounts, passed_on, MLPERF_SUITE_ROOT.

# Variables that enter a docker container, by prefix and by name; pyxis and apptainer pass on all. The named ones are
# those of a Slurm task, which the shell that composes the command does not have yet.
PASSED_PREFIXES='SLURM_ MLPERF_ NCCL_ UCX_ CUDA_ TORCH_ PYTORCH_ NVTE_ OMP_ SHARP_ MASTER_ GLOO_'
TASK_VARIABLES='SLURM_PROCID SLURM_LOCALID SLURM_NODEID SLURM_STEP_ID SLURM_STEP_NUM_TASKS SLURM_STEP_NODELIST
  SLURM_STEP_TASKS_PER_NODE SLURM_GPUS_ON_NODE SLURMD_NODENAME'
# Those that the configuration reads: configs/train.yaml.
SETTING_VARIABLES='NEXP LOGDIR CONTAINER CONT CLEAR_CACHES DROPCACHE_CMD'

# Ends the job if a folder cannot be written as HOST:CONTAINER, which has no quotes in pyxis and apptainer.
check_mounts() {
  local path mount separators=$'\n\t' paths=("$MLPERF_SUITE_ROOT" "$PWD" "$results" "$staging_dir" "${read_only[@]}")
  [[ $container == docker ]] || separators+=:,
  for mount in "${mounts[@]%:ro}"; do paths+=("${mount%%:*}" "${mount#*:}"); done
  for path in "${paths[@]}"; do
    [[ $path != *["$separators"]* ]] || die "$path cannot be mounted with launch.container=$container: its path has a" \
      "colon, a comma, a tab or a line break; use another folder, or mount it elsewhere on this machine (mount --bind)"
  done
}

# Prints HOST, CONTAINER and, if it is read-only, ro, with tabs between them; one mount a line.
all_mounts() {
  local path mount folders=("$MLPERF_SUITE_ROOT")
  [[ $PWD/ == "$MLPERF_SUITE_ROOT"/* ]] || folders+=("$PWD")
  for path in "${folders[@]}" "${read_only[@]}"; do
    printf '%s\t%s\tro\n' "$path" "$path"
  done
  for path in "$results" "$staging_dir"; do
    [[ -z $path ]] || printf '%s\t%s\n' "$path" "$path"
  done
  for mount in "${mounts[@]}"; do
    printf '%s\n' "${mount//:/$'\t'}"
  done
}

# Prints the mounts as HOST:CONTAINER[:ro], one a line.
mounts_with_colons() {
  all_mounts | tr '\t' ':'
}

# Prints the mounts as values of docker's --mount, one a line. They are CSV, in which quotes are doubled.
docker_mounts() {
  local host inside mode
  while IFS=$'\t' read -r host inside mode; do
    printf 'type=bind,"source=%s","target=%s"%s\n' "${host//\"/\"\"}" "${inside//\"/\"\"}" "${mode:+,readonly}"
  done < <(all_mounts)
}

# Sets step_flags, which srun needs, and wrapper, which precedes the program.
choose_container() {
  local mount name inside
  step_flags=() wrapper=()
  [[ $container == none ]] || check_mounts
  # Compiled kernels go below HOME. The image has a commit of its own, and what the host has in PYTHONPATH is not in it.
  inside=(env MLPERF_SUITE_IN_CONTAINER=1 PYTHONDONTWRITEBYTECODE=1 "HOME=/tmp/mlperf-suite-$job"
    "USER=$(id -un 2>/dev/null || id -u)" "PYTHONPATH=$MLPERF_SUITE_ROOT"
    "MLPERF_SUITE_COMMIT=$MLPERF_SUITE_COMMIT" "MLPERF_SUITE_DIRTY=$MLPERF_SUITE_DIRTY")
  case $container in
    none) return ;;
    pyxis)
      step_flags=(--container-image="$image" --container-workdir="$PWD" --no-container-mount-home
        --container-mounts="$(mounts_with_colons | paste -sd, -)")
      wrapper=("${inside[@]}")
      ;;
    apptainer)
      wrapper=(apptainer exec --nv --pwd "$PWD" --no-home)
      while IFS= read -r mount; do wrapper+=(--bind "$mount"); done < <(mounts_with_colons)
      wrapper+=("$image" "${inside[@]}")
      ;;
    docker)
      # ipc: shared memory of readers and NCCL. SYS_NICE: binding memory to a node.
      # Entrypoint: those of some images print a banner, which would end up among what Python answers.
      # Stop timeout: a run that is stopped writes a checkpoint and closes its log, which may take minutes.
      wrapper=(bash "$MLPERF_SUITE_ROOT/scripts/docker_run.sh")
      [[ ${MLPERF_GPUS:-all} == none ]] || wrapper+=(--gpus "${MLPERF_GPUS:-all}")
      # shellcheck disable=SC2054 # the commas are docker's
      wrapper+=(--user "$(container_user)" --rm --stop-timeout 300 --no-healthcheck --entrypoint ''
        --network host --ipc host --cap-add SYS_NICE --read-only --tmpfs /tmp:rw,exec,mode=1777 --workdir "$PWD")
      # Ranks in separate containers reach each other's memory through the host's process ids. There the program is not
      # process 1, which would need an init, and podman refuses both together.
      if [[ -n ${SLURM_JOB_ID:-} ]]; then wrapper+=(--pid host); else wrapper+=(--init); fi
      wrapper+=(--label "mlperf.job=$job")
      [[ -z $series ]] || wrapper+=(--label "mlperf.series=$results/$series")
      [[ ! -d /dev/infiniband ]] || wrapper+=(--device /dev/infiniband)
      [[ -z ${MLPERF_GATE:-} ]] || wrapper+=(--interactive)   # the ranks wait for a line of standard input
      while IFS= read -r mount; do wrapper+=(--mount "$mount"); done < <(docker_mounts)
      while read -r name; do wrapper+=(--env "$name"); done < <(passed_variables)
      wrapper+=("$image" "${inside[@]}")
      ;;
    *) die "launch.container or CONTAINER is $container: choose none, pyxis, apptainer or docker" ;;
  esac
}

# Nobody is root inside of docker: root's runs are those of the image's user, who is given the folder of results.
container_user() {
  if (($(id -u))); then
    echo "$(id -u):$(id -g)"
  else
    echo 10000:10000
  fi
}

passed_variables() {
  local name prefix
  # shellcheck disable=SC2086 # a list of names
  printf '%s\n' $TASK_VARIABLES $SETTING_VARIABLES
  while read -r name; do
    for prefix in $PASSED_PREFIXES; do
      [[ $name != "$prefix"* ]] || { echo "$name"; break; }
    done
  done < <(compgen -e)
  ((${#passed_on[@]} == 0)) || printf '%s\n' "${passed_on[@]}"
}

# What is left on a machine: docker's containers outlive a killed `docker run`, and apptainer's /tmp is the machine's.
# shellcheck disable=SC2016 # expanded on that machine
REMOVE_CACHES='rm -rf "/tmp/mlperf-suite-$MLPERF_JOB"'
# shellcheck disable=SC2016 # expanded on that machine
REMOVE_CONTAINERS='docker ps --quiet --filter "label=mlperf.job=$MLPERF_JOB" | xargs -r docker rm --force >/dev/null'
# A container outlives a driver that was killed by SIGKILL, and still trains.
# shellcheck disable=SC2016 # expanded on that machine
FIND_CONTAINERS='left=$(docker ps --quiet --filter "label=mlperf.series=$MLPERF_SERIES" | paste -sd " " -)
[[ -z $left ]] || {
  echo "run.sub: a container of this series still runs on $(hostname), without its driver: docker rm --force $left" >&2
  exit 1
}'
