"""Test mean Dice over volumes: counts against a direct computation in float64, scores, and invalid input."""

import json
import math

import numpy as np
import pytest
import torch

from benchmarks.unet3d.evaluate import DiceOfCounts, EvaluationSettings, MeanDice
from benchmarks.unet3d.sliding_window import count_classes
from benchmarks.unet3d.volumes import CASES, FORMAT, VolumeEntry
from common.contract.evaluation import Predictions
from common.data import manifest
from common.distributed.layout import Layout
from common.errors import ConfigError, DataError
from tests.benchmarks.unet3d.evaluation_oracle import (
    EVAL_CASES,
    SMALL,
    Pattern,
    counts_of,
    evaluation_of,
    expected_counts,
    read,
    weights_of,
)


@pytest.fixture(scope="module")
def expected():
    """Return the counts of a factor for which the two largest logits of every voxel differ by 1e-4, as for 3."""
    return expected_counts()


@pytest.mark.parametrize("batch", [1, 2, 3, 7, 64])
def test_counts_equal_a_direct_computation(expected, batch):
    """Batches of 2, 3 and 7 mix windows of several volumes; the last of 64 is mostly empty."""
    model = Pattern()
    evaluation = evaluation_of(model, batch=batch)
    assert counts_of(evaluation, model) == expected
    assert counts_of(evaluation, model) == expected  # the evaluation before has no influence


def test_windows_fill_batches_across_volumes():
    model = Pattern()
    evaluation = evaluation_of(model, batch=5)
    warm_up = model.batches
    evaluation.predict(weights_of(model))
    windows = [1, 2 * 2 * 2, 2 * 1 * 2, 3 * 1 * 2, 3 * 3 * 1]
    assert model.batches - warm_up == math.ceil(sum(windows) / 5) == 6


def test_counts_of_one_voxel_after_another():
    sums = torch.tensor([[1.0, 2, 0], [3, 2, 1], [0, 5, 5], [-3, -2, -1], [0, 0, 0]]).view(1, 1, 5, 3)
    label = torch.tensor([1, 1, 2, 2, 0], dtype=torch.uint8).view(1, 1, 5)
    counts = torch.tensor([[0, 0, 0], [0, 0, 0], [10, 10, 10]])
    count_classes(sums, label, counts)
    assert counts.tolist() == [[1, 2, 1], [1, 2, 2], [11, 11, 12]]  # predicted 1 0 1 2 0; of equals the first


def score_of(*cases):
    named = {f"case_{number}": {"counts": c, "voxels": sum(row[2] for row in c)} for number, c in enumerate(cases)}
    return DiceOfCounts().score(Predictions({"cases": named, "dice_smooth": 1e-6}))


def test_dice_is_averaged_over_cases_and_classes():
    small = [[5, 6, 7], [2, 3, 3], [1, 2, 1]]  # Dice 2/3 and 2/3
    large = [[700, 800, 900], [0, 100, 50], [90, 150, 100]]  # 0 and 0.72
    score = score_of(small, large)
    assert score["kidney_dice"] == pytest.approx((2 / 3 + 0) / 2, abs=1e-6)
    assert score["tumour_dice"] == pytest.approx((2 / 3 + 0.72) / 2, abs=1e-6)
    assert score["mean_dice"] == pytest.approx((1 / 3 + (2 / 3 + 0.72) / 2) / 2, abs=1e-6)
    assert score["eval_samples"] == 2


def test_a_class_that_is_absent_and_not_predicted_has_a_dice_of_1():
    score = score_of([[90, 90, 90], [10, 10, 10], [0, 0, 0]])
    assert score["kidney_dice"] == score["tumour_dice"] == score["mean_dice"] == 1.0


def test_a_class_that_is_absent_and_predicted_has_no_dice():
    assert score_of([[80, 80, 90], [10, 10, 10], [0, 10, 0]])["tumour_dice"] < 1e-6


def test_an_incomplete_case_has_no_score():
    values = {"cases": {"case_00003": {"counts": [[1, 1, 2], [0, 0, 0], [0, 0, 0]], "voxels": 2}}, "dice_smooth": 1e-6}
    with pytest.raises(RuntimeError, match="1 of 2 voxels of case_00003 were evaluated"):
        DiceOfCounts().score(Predictions(values))


def test_a_label_outside_the_classes_is_an_error():
    values = {"cases": {"case_00003": {"counts": [[1, 2, 1], [0, 0, 0], [0, 0, 0]], "voxels": 2}}, "dice_smooth": 1e-6}
    with pytest.raises(DataError, match="case_00003: 1 of 2 voxels have a label above 2"):
        DiceOfCounts().score(Predictions(values))


def write_data(root, cases):
    """Write a prepared folder."""
    root.mkdir()
    names = []
    for case in cases:
        for array, end in zip(read(case), "xy", strict=True):
            names.append(f"{case.name}_{end}.npy")
            np.save(root / names[-1], array[None])
    (root / CASES).write_text(json.dumps({c.name: {"shape": list(c.shape), "split": c.split} for c in cases}))
    names.append(CASES)
    counts = {"train_samples": 1, "eval_samples": len(cases) - 1}
    manifest.write(root, manifest.Manifest(FORMAT, manifest.describe_files(root, names), counts, True, {}))
    return root


TRAINING_CASE = VolumeEntry("case_00099", (16, 16, 16), "train")


def unopened(model):
    return MeanDice(model, EvaluationSettings(SMALL, 3, 1e-6), Layout(), torch.float32, capture=True)


def test_prepared_cases_are_read_only_once(tmp_path, expected):
    root = write_data(tmp_path / "data", [*EVAL_CASES, TRAINING_CASE])
    model = Pattern()
    evaluation = unopened(model)
    evaluation.open_data(root)
    for file in root.iterdir():
        file.unlink()
    assert counts_of(evaluation, model) == expected
    score = evaluation.scorer.score(evaluation.predict(weights_of(model)))
    assert score["eval_samples"] == len(EVAL_CASES)


def test_a_folder_without_evaluation_cases_is_an_error(tmp_path):
    root = write_data(tmp_path / "data", [TRAINING_CASE])
    with pytest.raises(DataError, match="has no case for eval"):
        unopened(Pattern()).open_data(root)


def test_windows_that_cannot_be_cut_into_equal_slabs_are_an_error():
    with pytest.raises(ConfigError, match="cp=3 does not divide windows of 16 planes"):
        MeanDice(Pattern(), EvaluationSettings(SMALL, 1, 1e-6), Layout({"cp": 3}), torch.float32, capture=False)


def test_a_network_of_other_classes_is_an_error():
    evaluation = unopened(torch.nn.Conv3d(1, 2, 1))
    with pytest.raises(ConfigError, match=r"logits have shape \(3, 2, 16, 16, 16\)"):
        evaluation.warm_up()


@pytest.mark.parametrize("training", [True, False])
def test_the_mode_of_the_network_is_restored(training):
    model = Pattern().train(training)
    evaluation = evaluation_of(model)
    assert model.training == training
    evaluation.predict(weights_of(model))
    assert model.training == training


def test_the_mode_of_the_network_is_restored_after_an_error(monkeypatch):
    model = Pattern()
    evaluation = evaluation_of(model)

    def fail(image_NCDHW):
        raise ZeroDivisionError

    monkeypatch.setattr(model, "forward", fail)
    with pytest.raises(ZeroDivisionError):
        evaluation.predict(weights_of(model))
    assert model.training


def test_evaluation_needs_no_gradients():
    model = Pattern()
    evaluation_of(model).predict(weights_of(model))
    assert not model.with_gradients


def test_the_weights_of_the_training_network_are_not_copied():
    model = Pattern()
    evaluation = evaluation_of(model)
    weights = weights_of(model)
    evaluation.predict(weights)
    with torch.no_grad():
        model.factor.fill_(3.0)  # an update in place, between two evaluations
    assert counts_of(evaluation, model) == expected_counts(factor=3.0)
    assert model.factor.item() == 3.0


def test_other_weights_are_evaluated_and_leave_those_in_training_as_they_were():
    other, in_training = Pattern(factor=3.0), Pattern(factor=1.0)
    assert counts_of(evaluation_of(in_training), other) == expected_counts(factor=3.0)
    assert in_training.factor.item() == 1.0


def test_a_network_that_has_diverged_gets_a_score():
    model = Pattern(factor=float("nan"))
    evaluation = evaluation_of(model)
    score = evaluation.scorer.score(evaluation.predict(weights_of(model)))
    assert score["eval_samples"] == len(EVAL_CASES)
