"""Whether a checkpoint is the one that the rules start from: its masked-LM accuracy before any training.

No run evaluates it: no data may be touched before ``run_start``, and afterwards it would cost time. So this is a
command of its own, once per checkpoint: ``python -m benchmarks.bert.starting_point assets_dir=… data_dir=…``, with any
of the overrides of ``mlperf-suite train benchmark=bert``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.bert.prepare import FORMAT, PREPARE_COMMAND
from benchmarks.bert.workload import BertPretraining
from common.config import loading
from common.config.composition import compose
from common.config.schema import RunConfig
from common.data import manifest
from common.distributed.layout import Layout
from common.distributed.startup import pick_device
from common.errors import CheckpointError, ConfigError, SuiteError, print_error

ACCURACY = 0.34085
"""Of the rules' checkpoint, right after it is loaded (mlcommons/training, retired_benchmarks/bert/README.md)."""

TOLERANCE = 0.005
"""What rounding may change: the known value is of fp32, and the first evaluation of a run lies 0.03 above it."""


def evaluate(run: RunConfig, data_dir: Path, device: torch.device) -> float:
    """Masked-LM accuracy of the checkpoint that ``run`` starts from, on one device.

    Raises:
        ConfigError: ``run`` starts from no checkpoint.
        CheckpointError: the checkpoint is damaged or of another model.
        DataError: the evaluation set is missing or damaged.
    """
    if run.assets_dir is None:
        raise ConfigError("assets_dir=null: there is no checkpoint to evaluate; name the folder that it is in")
    layout = Layout(device=device)
    workload = BertPretraining(run, layout)
    evaluation = workload.evaluation(layout)
    evaluation.open_data(data_dir)
    values = evaluation.scorer.score(evaluation.predict(workload.weights()))
    evaluation.close()
    workload.close()
    return values["masked_lm_accuracy"]


def check(accuracy: float) -> None:
    """Compare with the known value.

    Raises:
        CheckpointError: it is another one.
    """
    if not abs(accuracy - ACCURACY) <= TOLERANCE:
        raise CheckpointError(
            f"masked_lm_accuracy {accuracy:.5f} where the rules' checkpoint has {ACCURACY}: it is another checkpoint, "
            "a wrong conversion of it, or another evaluation set"
        )


def main(argv: Sequence[str]) -> int:
    """Print the accuracy; returns the exit code."""
    try:
        tree = compose(["benchmark=bert", "scale=1xH200", *argv])
        run, session = loading.load(tree, lambda _: BertPretraining)
        found = manifest.read(session.data_dir, FORMAT, PREPARE_COMMAND)
        if found.stand_in or found.custom:
            other = found.custom or "the data are synthetic"
            raise ConfigError(f"data_dir={session.data_dir}: {other}; the known accuracy is of the rules' set")
        accuracy = evaluate(run, session.data_dir, pick_device(session.device, 0))
        check(accuracy)
    except SuiteError as error:
        print_error(error)
        return error.exit_code
    print(f"masked_lm_accuracy {accuracy:.5f}: the rules' checkpoint has {ACCURACY}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
