"""The script that counts the files which a step enters."""

from __future__ import annotations

import pytest

from scripts.count_entered_files import entered
from tests import toy
from tests.conftest import ROOT


def test_a_step_enters_the_trainer_and_the_optimizer_and_no_files_of_start_and_end(data_of, tmp_path):
    overrides = [f"benchmark={toy.NAME}", "scale=test", "device=cpu", f"data_dir={data_of(toy.NAME)}"]
    with toy.known(pictures=False):
        files = entered(["train", *overrides, "benchmark.schedule.last_epoch=1", f"output_dir={tmp_path}"])
    assert files == sorted(set(files))
    assert {"common/run/trainer.py", "common/step/train_step.py", "common/optim/optimizer.py"} <= set(files)
    assert not {"common/cli.py", "common/run/start.py", "common/run/conclusion.py"} & set(files)
    assert all((ROOT / name).is_file() and name.startswith(("common/", "benchmarks/")) for name in files)


def test_a_run_without_a_second_step_is_an_error():
    with pytest.raises(RuntimeError, match="exit code 2 before its second step"):
        entered(["train", "benchmark=none"])
