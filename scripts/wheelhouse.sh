#!/usr/bin/env bash
# An installation for a site without a network.
#
#   scripts/wheelhouse.sh build   [FOLDER]          fill FOLDER (wheelhouse) with every package that the suite needs, and
#                                                   write the bundle, dist/mlperf-suite-*.tar: FOLDER and the last commit
#   scripts/wheelhouse.sh install [FOLDER] [VENV]   make VENV (.venv) and install into it from FOLDER alone
#
# `make wheelhouse` is the first. In an unpacked bundle, `make train`, `make test` and the others do the second by
# themselves. PYTHON: the interpreter (python3); EXTRAS: of pyproject.toml (dev,tensorboard).
set -euo pipefail

die() { echo "wheelhouse.sh: $*" >&2; exit 2; }

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
PYTHON=${PYTHON:-python3}
EXTRAS=${EXTRAS:-dev,tensorboard}

main() {
  case ${1:-} in
    build) build "$(absolute "${2:-$ROOT/wheelhouse}")" ;;
    install) install_from "$(absolute "${2:-$ROOT/wheelhouse}")" "$(absolute "${3:-$ROOT/.venv}")" ;;
    *) die "choose build or install; see the head of this file" ;;
  esac
}

absolute() { realpath --canonicalize-missing "$1"; }

version_of() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null; }

build() {
  local folder=$1 commit version python
  commit=$(git -C "$ROOT" rev-parse HEAD 2>/dev/null) || die "$ROOT is no git checkout: a bundle holds a commit"
  [[ -z $(git -C "$ROOT" status --porcelain) ]] || echo "Uncommitted changes stay out of the bundle." >&2
  version=$(git -C "$ROOT" show HEAD:pyproject.toml | sed -n 's/^version = "\(.*\)"/\1/p')
  python=$(version_of "$PYTHON") || die "$PYTHON does not run: PYTHON=python3.12 names another"

  [[ ! -e $folder || -f $folder/BUNDLE ]] || die "$folder exists and is no wheelhouse: it is left as it is"

  # Global, since the trap outlives this function. pip unpacks gigabytes, more than many a /tmp has.
  mkdir -p "$(dirname "$folder")"
  work=$(mktemp -d "$folder.work.XXXXXX")
  export TMPDIR=$work
  partial=$folder.partial
  trap 'rm -rf "$work" "$partial" "$ROOT"/dist/*.tar.partial' EXIT
  rm -rf "$partial"
  mkdir -p "$work/source" "$partial" "$ROOT/dist"
  git -C "$ROOT" archive HEAD | tar --extract --directory "$work/source"
  "$PYTHON" -m venv "$work/venv" || die "$PYTHON makes no virtual environments (Debian, Ubuntu: apt install python3-venv)"
  download "$work" "$partial"
  printf '%s\n' "version=$version" "commit=$commit" "python=$python" "extras=$EXTRAS" \
    "platform=$(uname -s) $(uname -m), $(getconf GNU_LIBC_VERSION 2>/dev/null || echo 'another C library')" >"$partial/BUNDLE"
  (cd "$partial" && sha256sum -- *.whl BUNDLE >SHA256SUMS)
  rm -rf "$folder"
  mv "$partial" "$folder"
  pack "$folder" "mlperf-suite-$version-py$python-$(uname -m)"
}

# pip wheel, not pip download: what is published as source only is built here, where its build tools are.
download() {
  local work=$1 to=$2
  (cd "$work/source" && "$work/venv/bin/python" -m pip wheel --disable-pip-version-check \
    --wheel-dir "$to" --constraint constraints.txt ".[$EXTRAS]" pip setuptools wheel)
  rm -f "$to"/mlperf_suite-*.whl   # it is installed from the source
}

pack() {
  local folder=$1 name=$2 tar=$ROOT/dist/$2.tar
  mkdir "$work/$name"
  git -C "$ROOT" archive HEAD | tar --extract --directory "$work/$name"
  # One command for both: appended to git's own tar, long names would not fit its format.
  tar --create --format=gnu --file="$tar.partial" --owner=0 --group=0 --directory="$work" "$name" \
    --directory="$folder" --transform="s,^\.\(/\|\$\),$name/wheelhouse\1,r" .
  mv "$tar.partial" "$tar"
  echo "$(find "$folder" -name '*.whl' | wc -l) packages, $(du --human-readable "$tar" | cut -f1): $tar"
  echo "There: tar -xf $name.tar && cd $name && make train      (Python $(version_of "$PYTHON"))"
}

# Sets PYTHON to an interpreter of the bundle's version, which need not be the one that was named.
choose_python() {
  local wanted=$1 candidate
  for candidate in "$PYTHON" "python$wanted"; do
    if [[ $(version_of "$candidate") == "$wanted" ]]; then PYTHON=$candidate; return; fi
  done
  die "the bundle is for Python $wanted, and $PYTHON is $(version_of "$PYTHON" || echo missing): name one with" \
    "PYTHON=/path/to/python$wanted, or make the bundle with yours"
}

# Prints the wheels that this machine's interpreter cannot use, as pip judges them.
foreign_wheels() {
  "$PYTHON" - "$1" <<'END'
import sys
from pathlib import Path

wheels = sorted(Path(sys.argv[1]).glob("*.whl"))
sys.path.insert(0, next(str(wheel) for wheel in wheels if wheel.name.startswith("pip-")))
from pip._vendor.packaging.tags import sys_tags
from pip._vendor.packaging.utils import parse_wheel_filename

here = set(sys_tags())
print(*(wheel.name for wheel in wheels if not here & parse_wheel_filename(wheel.name)[3]))
END
}

install_from() {
  local folder=$1 venv=$2 key value python='' extras='' platform='' foreign pip
  [[ -f $folder/BUNDLE && -f $folder/SHA256SUMS ]] || die "$folder is no wheelhouse: make wheelhouse fills one"
  (cd "$folder" && sha256sum --check --quiet --strict SHA256SUMS) ||
    die "$folder was damaged on its way: copy the files named above, or the bundle, again"
  while IFS='=' read -r key value; do
    case $key in python) python=$value ;; extras) extras=$value ;; platform) platform=$value ;; esac
  done <"$folder/BUNDLE"
  choose_python "$python"
  foreign=$(foreign_wheels "$folder")
  [[ -z $foreign ]] || die "the bundle was made on $platform and does not fit this machine: $foreign"

  # Nothing else may be asked, not even an index that the site's pip.conf names.
  PIP_FIND_LINKS=$("$PYTHON" -c 'import pathlib, sys; print(pathlib.Path(sys.argv[1]).as_uri())' "$folder")
  export PIP_FIND_LINKS PIP_NO_INDEX=1 PIP_CONFIG_FILE=/dev/null PIP_DISABLE_PIP_VERSION_CHECK=1
  # pip comes from the wheelhouse: a Python without ensurepip will do.
  [[ -x $venv/bin/python ]] || "$PYTHON" -m venv --without-pip "$venv"
  [[ $(version_of "$venv/bin/python") == "$python" ]] || die "$venv is not of Python $python: remove it, or set VENV"
  pip=$(echo "$folder"/pip-*.whl)
  "$venv/bin/python" "$pip/pip" install --quiet pip
  cd "$ROOT"
  "$venv/bin/python" -m pip install --quiet --constraint constraints.txt --editable ".[$extras]"
}

main "$@"
