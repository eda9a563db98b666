"""Generated click logs: Criteo's format, skewed categories, and a signal whose best AUC is known."""

from __future__ import annotations

import itertools
import json
import re

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from common.errors import ConfigError
from common.recommendation.criteo.commands import click_log_commands
from common.recommendation.criteo.preparation.encoding import Encoding
from common.recommendation.criteo.sample_rows import SampleFormat
from common.recommendation.criteo.synthetic import (
    SyntheticClicks,
    bayes_auc,
    calibrated,
    generate,
    raw_categories,
    weights,
)

TABLES = (1_000_000, 3, *(40,) * 24)
SYNTHETIC = SyntheticClicks(train=2_000, evaluation=200, cap=300)
COUNTS = SampleFormat("one-hot/1", False, "train_data.bin", "test_data.bin", "prepare")


@pytest.fixture(scope="module")
def raw(tmp_path_factory):
    folder = tmp_path_factory.mktemp("criteo") / "raw"
    return folder, generate(folder, TABLES, SYNTHETIC)


def test_lines_have_criteos_format(raw):
    folder, _ = raw
    field = {"label": "[01]", "integer": "(-?[0-9]+)?", "category": "([0-9a-f]{8})?"}
    fields = [field["label"], *[field["integer"]] * 13, *[field["category"]] * 26]
    line = re.compile("\t".join(fields) + "\n")
    texts = [(folder / f"day_{day}").read_text() for day in range(24)]
    lines = "".join(texts).splitlines(keepends=True)
    assert all(line.fullmatch(each) for each in lines)
    assert [len(text.splitlines()) for text in texts[-1:]] == [400]
    assert len(lines) == 2_400
    values = [each.rstrip("\n").split("\t") for each in lines]
    integers, categories = ([row[part] for row in values] for part in (slice(1, 14), slice(14, 40)))
    for wanted in ("", "-1", "-2", "0"):
        assert any(wanted in row for row in integers)
    flat = [text for row in categories for text in row]
    assert "" in flat
    assert max(int(text or "0", 16) for text in flat) >= 2**31
    for feature, rows in enumerate(TABLES):
        assert len({row[feature] for row in categories}) <= min(rows, 300)


def test_the_marker_has_the_bayes_auc_and_the_tables(raw):
    folder, generated = raw
    found = json.loads((folder / "SYNTHETIC").read_text())
    assert found["table_rows"] == [300, 3, *[40] * 24]
    assert generated == f"2,000 + 200 samples in 24 days, Bayes AUC {found['bayes_auc']:.4f}"


def test_the_bayes_auc_is_the_expectation_over_all_labels():
    click = np.array([0.1, 0.7, 0.4, 0.7, 0.9])
    ordered = pairs = 0.0
    for labels in itertools.product((0, 1), repeat=5):
        chance = np.prod(np.where(labels, click, 1 - click))
        for one, other in itertools.product(range(5), repeat=2):
            if labels[one] > labels[other]:
                pairs += chance
                ordered += chance * ((click[one] > click[other]) + (click[one] == click[other]) / 2)
    assert bayes_auc([click[:2], click[2:]]) == pytest.approx(ordered / pairs, rel=1e-12)


@pytest.fixture(scope="module")
def drawn():
    return calibrated((300, 4, *(40,) * 24), 0.8, 0.25, 0).draw(40_000, 5)


def test_clicks_come_at_the_wanted_rate_and_the_true_probabilities_reach_the_wanted_auc(drawn):
    deviation = 0.5 / np.sqrt(10_000 * 3 / 4)  # of an AUC of 10,000 clicks among 40,000, at most
    assert drawn.labels.mean() == pytest.approx(0.25, abs=0.01)
    assert roc_auc_score(drawn.labels, drawn.click) == pytest.approx(0.8, abs=3 * deviation)
    assert bayes_auc([drawn.click]) == pytest.approx(0.8, abs=0.005)


def test_categories_are_zipf_distributed(drawn):
    present = drawn.categories[:, 0][drawn.categories[:, 0] >= 0]
    counts = np.bincount(present, minlength=299)
    shares = np.arange(1, 300) ** -1.05
    expected = shares / shares.sum() * len(present)
    assert (np.abs(counts - expected) < 5 * np.sqrt(expected)).all()
    assert 1 - len(present) / 40_000 == pytest.approx(0.05, abs=0.01)


def test_neither_kind_of_feature_alone_explains_the_clicks(drawn):
    dense, categorical = weights(26, 0)
    logarithms = np.log1p(np.maximum(drawn.counts, 0)) @ dense
    chosen = sum(
        np.where(drawn.categories[:, k] < 0, 0, effects[drawn.categories[:, k] % 64])
        for k, effects in enumerate(categorical)
    )
    alone = [roc_auc_score(drawn.labels, part) for part in (logarithms, chosen)]
    assert all(0.6 < auc < 0.78 for auc in alone)


def test_raw_categories_are_different():
    found = raw_categories(299, 0, 0)
    assert len(np.unique(found)) == 299
    assert found.min() > 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train": 22}, "--train=22"),
        ({"cap": 1}, "--cap=1"),
        ({"bayes_auc": 0.5}, "--auc=0.5"),
        ({"click_rate": 0.0}, "--click-rate=0.0"),
        ({"seed": -1}, "--seed=-1"),
    ],
)
def test_impossible_requests_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        SyntheticClicks(**changes)


@pytest.mark.usefixtures("no_waiting_for_the_disk")
def test_the_commands_go_from_nothing_to_verified_data(tmp_path, capsys):
    encoding = Encoding(COUNTS, (1,) * 26, TABLES, 50, 0, 40_000_000, False)
    commands = click_log_commands("clicks", COUNTS, lambda: encoding)
    raw, data = ["--raw-dir", str(tmp_path / "raw")], ["--data-dir", str(tmp_path / "data")]
    commands.run("generate", [*raw, "--train", "100", "--eval", "10", "--cap", "20", "--workers", "1"])
    assert "100 + 10 samples in 24 days, Bayes AUC 0." in capsys.readouterr().out
    commands.run("prepare", [*raw, *data, "--workers", "1", "--memory-gb", "0.01", "--table-cap", "7"])
    message = capsys.readouterr().out
    assert "synthetic, train_samples 100, eval_samples 10" in message
    assert "table rows: [7, 3, 7, " in message
    commands.run("verify", [*data, "--workers", "1"])
    again = capsys.readouterr().out
    assert "synthetic" in again
    assert message.splitlines()[1] in again
    with pytest.raises(ConfigError, match="--memory-gb=0"):
        commands.run("prepare", [*raw, *data, "--memory-gb", "0"])
