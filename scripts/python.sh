# shellcheck shell=bash
# Sourced: which Python runs the suite (MLPERF_SUITE_PYTHON, else the repository's .venv, else python3), from its source.
PYTHON=${MLPERF_SUITE_PYTHON:-}
if [[ -z $PYTHON ]]; then
  PYTHON=python3
  if [[ -z ${MLPERF_SUITE_IN_CONTAINER:-} && -x $MLPERF_SUITE_ROOT/.venv/bin/python ]]; then
    PYTHON=$MLPERF_SUITE_ROOT/.venv/bin/python
  fi
fi
[[ $MLPERF_SUITE_ROOT != *:* ]] || {
  echo "$MLPERF_SUITE_ROOT: the path of the repository has a colon, at which PYTHONPATH is split; move the repository" >&2
  exit 2
}
# PyTorch's warning that a host has no name in DNS would come from every rank.
export TORCH_CPP_LOG_LEVEL=${TORCH_CPP_LOG_LEVEL:-ERROR}
export PYTHONPATH=$MLPERF_SUITE_ROOT${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
