#!/usr/bin/env bash
# Builds the image of one or more families of workloads and stamps the commit into it.
#
#   docker/build.sh vision                               mlperf-suite:vision-<commit>, "-dirty" added when it is
#   docker/build.sh all                                  every family
#   docker/build.sh language --build-arg MAX_JOBS=32     what begins with a dash, and all after it, goes to docker build
#
# DOCKER names another builder (podman, nerdctl); IMAGE another repository than mlperf-suite; DRY_RUN=1 only prints.
set -euo pipefail

FAMILIES=(vision language speech recommendation graph diffusion)

die() { echo "build.sh: $*" >&2; exit 2; }

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
chosen=()
while (($#)) && [[ $1 != -* ]]; do
  case " all ${FAMILIES[*]} " in
    *" $1 "*) ;;
    *) die "no family '$1'; choose all, or of ${FAMILIES[*]}" ;;
  esac
  if [[ $1 == all ]]; then chosen=("${FAMILIES[@]}"); else chosen+=("$1"); fi
  shift
done
((${#chosen[@]})) || die "say which family: docker/build.sh vision, or all of them: ${FAMILIES[*]}"

commit=$(git -C "$root" rev-parse HEAD) || die "$root is no git checkout: an image says which commit it holds"
dirty=false suffix=
if [[ -n $(git -C "$root" status --porcelain) ]]; then dirty=true suffix=-dirty; fi
source=$(git -C "$root" remote get-url origin 2>/dev/null | sed -E 's#//[^/@]*@#//#') || source=
[[ $source == *:* ]] || source=   # a folder of this machine says nothing elsewhere
version=$(sed -n 's/^version = "\(.*\)"/\1/p' "$root/pyproject.toml")
[[ -n $version ]] || die "$root/pyproject.toml names no version"

for family in "${chosen[@]}"; do
  command=("${DOCKER:-docker}" build --file "$root/docker/Dockerfile" --target "$family"
    --tag "${IMAGE:-mlperf-suite}:$family-${commit:0:12}$suffix"
    --build-arg "SUITE_VERSION=$version" --build-arg "SUITE_COMMIT=$commit" --build-arg "SUITE_DIRTY=$dirty"
    --build-arg "SUITE_SOURCE=$source" "$@" "$root")
  if [[ -n ${DRY_RUN:-} ]]; then
    printf '%q ' "${command[@]}"
    echo
  else
    # Podman's default format, OCI, has neither SHELL nor HEALTHCHECK.
    DOCKER_BUILDKIT=1 BUILDAH_FORMAT=docker "${command[@]}"
  fi
done
