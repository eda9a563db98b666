#!/usr/bin/env bash
# Builds a base image without a container registry: Debian or Ubuntu from this machine's package mirror, and PyTorch with
# what the suite needs from a wheelhouse (make wheelhouse). It has no CUDA compiler.
#
#   docker/debian_base.sh [IMAGE] [WHEELHOUSE]     mlperf-suite:base, wheelhouse
#
# Prints the options of docker/build.sh that build on it. Needs root, debootstrap and buildah; BUILDAH_ISOLATION=chroot
# where containers cannot run. CODENAME and MIRROR name another release than this machine's, and its packages.
set -euo pipefail

die() { echo "debian_base.sh: $*" >&2; exit 2; }

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
image=${1:-mlperf-suite:base}
wheelhouse=$(realpath --canonicalize-missing "${2:-$root/wheelhouse}")
[[ -f $wheelhouse/BUNDLE ]] || die "$wheelhouse is no wheelhouse: make wheelhouse fills one"
((EUID == 0)) || die "debootstrap and a mounted image need root: sudo docker/debian_base.sh"
for program in buildah debootstrap; do
  command -v "$program" >/dev/null || die "$program is not installed (apt-get install $program)"
done

# shellcheck source=/dev/null
codename=${CODENAME:-$(. /etc/os-release && echo "${VERSION_CODENAME:-}")}
[[ -n $codename ]] || die "this machine's release has no code name: CODENAME=bookworm MIRROR=URL name one"
# shellcheck disable=SC2016 # apt expands these
mirror=${MIRROR:-$(apt-get indextargets --format '$(CODENAME) $(REPO_URI)' 'Created-By: Packages' |
  awk -v name="$codename" '$1 == name { print $2; exit }')}
[[ -n $mirror ]] || die "this machine's apt has no mirror of $codename: MIRROR=URL names one"
# debootstrap reads proxies from the environment, and apt's own settings are elsewhere.
eval "$(apt-config shell proxy Acquire::http::Proxy)"
[[ -z ${proxy:-} ]] || export http_proxy=$proxy

container=$(buildah from scratch)
trap 'buildah rm "$container" >/dev/null' EXIT

# While a layer is written, its files exist three times on the disk, so several small layers need less free space than one.
commit_layer() {
  buildah commit --quiet --format docker "$container" "$image-unfinished" >&2
  buildah rm "$container" >/dev/null
  container=$(buildah from "$image-unfinished")
}

mounted=$(buildah mount "$container")
debootstrap --variant=minbase --include=ca-certificates,python3 "$codename" "$mounted" "$mirror" >&2
rm -rf "$mounted"/var/cache/apt/archives/*.deb "$mounted"/var/lib/apt/lists/*

in_image() {
  buildah run --volume "$wheelhouse:/wheelhouse:ro" --volume "$root/docker/requirements:/requirements:ro" \
    --env PIP_BREAK_SYSTEM_PACKAGES=1 --env PIP_ROOT_USER_ACTION=ignore "$container" "$@"
}
python=$(in_image python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])')
wanted=$(sed -n 's/^python=//p' "$wheelhouse/BUNDLE")
[[ $python == "$wanted" ]] || die "$codename has Python $python and the wheelhouse is for $wanted: choose another" \
  "CODENAME, or make the wheelhouse with PYTHON=python$python"
# pip runs from its own wheel, and installs itself.
# shellcheck disable=SC2016 # expanded in the container
in_image sh -c 'python3 "$(echo /wheelhouse/pip-*.whl)/pip" install --quiet --no-cache-dir --no-deps /wheelhouse/pip-*.whl' >&2
commit_layer
install() { in_image python3 -m pip install --quiet --no-cache-dir --no-index --find-links /wheelhouse "$@" >&2; }
packages=(torch torchvision --requirement /requirements/suite.txt)
# shellcheck disable=SC2016 # Python's
list_wheels='import json, os, sys, urllib.request as request
paths = [request.url2pathname(wheel["download_info"]["url"].removeprefix("file://")) for wheel in json.load(sys.stdin)["install"]]
for size, path in sorted(((os.path.getsize(path), path) for path in paths), reverse=True): print(size, path)'
wheels=$(in_image python3 -m pip install --quiet --dry-run --report - --no-index --find-links /wheelhouse "${packages[@]}" |
  in_image python3 -c "$list_wheels")
group=() bytes=0
while read -r size wheel; do
  group+=("$wheel")
  ((bytes += size))
  ((bytes > 100000000)) || continue
  install --no-deps "${group[@]}" </dev/null
  commit_layer
  group=() bytes=0
done <<<"$wheels"
install "${packages[@]}"
cuda=$(in_image python3 -c 'import torch; print(torch.version.cuda)')
commit_layer
buildah tag "$image-unfinished" "$image"
buildah rmi "$image-unfinished" >/dev/null   # only the name

# NAME-VERSION-….whl; in names, a dash is written as an underscore.
pins=$(cd "$wheelhouse" && printf '%s\n' *.whl | awk -F- '{ print $1 "==" $2 }' | paste -sd ' ' -)
printf '%s\n' --build-arg "DEVEL_IMAGE=$image" --build-arg "RUNTIME_IMAGE=$image" --build-arg "PYTORCH_CUDA=$cuda" \
  --build-arg "PINS=$pins"
