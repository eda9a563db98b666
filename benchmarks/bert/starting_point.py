"""Check that a checkpoint is the one from which the rules start, by its masked-LM accuracy before training.

A training run cannot check this: the rules forbid touching data before ``run_start``, and afterwards it would cost
time. Run this command once per checkpoint: ``python -m benchmarks.bert.starting_point assets_dir=… data_dir=…``. It
accepts the overrides of ``mlperf-suite train benchmark=bert``.
"""

from __future__ import annotations

import argparse
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
"""Accuracy of the rules' checkpoint before training (mlcommons/training, retired_benchmarks/bert/README.md)."""

TOLERANCE = 0.005
"""Maximum difference by rounding, since ``ACCURACY`` is for fp32. After some training, accuracy is 0.03 higher."""


def evaluate(run: RunConfig, data_dir: Path, device: torch.device) -> float:
    """Return the masked-LM accuracy of the checkpoint from which ``run`` starts, on one device.

    Raises:
        ConfigError: ``run`` does not start from a checkpoint.
        CheckpointError: the checkpoint is damaged or belongs to another model.
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
    """Compare ``accuracy`` with ``ACCURACY``.

    Raises:
        CheckpointError: the difference is larger than ``TOLERANCE``.
    """
    if not abs(accuracy - ACCURACY) <= TOLERANCE:
        raise CheckpointError(
            f"masked_lm_accuracy {accuracy:.5f} where the rules' checkpoint has {ACCURACY}: it is another checkpoint, "
            "a wrong conversion of it, or another evaluation set"
        )


def main(argv: Sequence[str]) -> int:
    """Print the accuracy and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bert.starting_point", description=__doc__)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="as of mlperf-suite train benchmark=bert")
    try:
        tree = compose(["benchmark=bert", "scale=1xH200", *parser.parse_args(argv).overrides])
        run, session = loading.load(tree, lambda _: BertPretraining)
        found = manifest.read(session.data_dir, FORMAT, PREPARE_COMMAND)
        if found.synthetic or found.custom:
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
