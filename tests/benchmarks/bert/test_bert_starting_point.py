"""The command that tells whether a checkpoint is the one that the rules start from."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from small_shards import FACTS, make_packs, make_samples, write_data

from benchmarks.bert import starting_point
from benchmarks.bert.tf_checkpoint import weights
from benchmarks.bert.workload import BertPretraining
from common.config import loading
from common.config.composition import compose
from common.data import manifest
from common.distributed.layout import Layout
from common.errors import CheckpointError

SMALL = ["benchmark.train_samples=4", "benchmark.eval_samples=12", "device=cpu", "scale=test",
         *(f"benchmark.facts.{name}={value}" for name, value in FACTS.items())]  # fmt: skip


@pytest.mark.parametrize("accuracy", [0.34085, 0.3441, 0.3373])
def test_the_known_accuracy_passes_to_a_rounding(accuracy):
    starting_point.check(accuracy)


@pytest.mark.parametrize("accuracy", [0.0, 0.334, 0.38, 0.72, float("nan")])
def test_another_accuracy_is_an_error_that_names_both(accuracy):
    with pytest.raises(CheckpointError, match=rf"{accuracy:.5f} where the rules' checkpoint has 0\.34085"):
        starting_point.check(accuracy)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A small set that says to be the real one."""
    root = write_data(tmp_path / "data", make_packs([1, 3]), 1, make_samples([20] * 12))
    path = root / manifest.NAME
    changed = path.read_text().replace('"synthetic": true', '"synthetic": false')
    assert changed != path.read_text()
    path.write_text(changed)
    return root


def saved_network(folder: Path) -> tuple[Path, BertPretraining]:
    """A checkpoint of the PyTorch port, and the workload whose weights are in it."""
    run, _ = loading.load(compose(["benchmark=bert", *SMALL]), lambda _: BertPretraining)
    workload = BertPretraining(run, Layout(seed=11))
    parameters = dict(workload.model.named_parameters())
    state = {}
    for weight in weights(run.workload.facts.layers):
        tensor = parameters[weight.parameter].detach()
        state[weight.torch] = tensor if weight.part is None else tensor.chunk(3)[weight.part].clone()
    folder.mkdir()
    torch.save(state, folder / "weights.pt")
    return folder, workload


def test_the_checkpoint_is_evaluated_and_compared(data, tmp_path, monkeypatch, capsys):
    assets, workload = saved_network(tmp_path / "assets")
    evaluation = workload.evaluation(Layout())
    evaluation.open_data(data)
    accuracy = evaluation.scorer.score(evaluation.predict(workload.weights()))["masked_lm_accuracy"]
    given = [*SMALL, f"data_dir={data}", f"assets_dir={assets}", "model.initial_checkpoint=weights.pt"]
    assert starting_point.main(given) == CheckpointError.exit_code
    assert f"masked_lm_accuracy {accuracy:.5f} where" in capsys.readouterr().err
    monkeypatch.setattr(starting_point, "ACCURACY", accuracy)
    assert starting_point.main(given) == 0
    assert f"masked_lm_accuracy {accuracy:.5f}: the rules' checkpoint has" in capsys.readouterr().out


def test_synthetic_data_and_no_checkpoint_are_refused(data, tmp_path, capsys):
    assert starting_point.main([*SMALL, f"data_dir={data}"]) == 2
    assert "assets_dir=null: there is no checkpoint" in capsys.readouterr().err
    other = write_data(tmp_path / "synthetic", make_packs([1, 3]), 1, make_samples([20] * 12))
    assert starting_point.main([*SMALL, f"data_dir={other}"]) == 2
    assert "synthetic: the data are synthetic; the known accuracy is of the rules' set" in capsys.readouterr().err
