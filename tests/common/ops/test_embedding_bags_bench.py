"""What the benchmark of embedding bags measures."""

from __future__ import annotations

import pytest
import torch

from common.ops import embedding_bags
from common.ops.bench import cases
from common.ops.embedding_bags import bench_cases
from tests.references import run_references

SAMPLES = 64


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference in the place of the kernels."""
    monkeypatch.setattr(cases, "DEVICE", "cpu")
    run_references(monkeypatch, embedding_bags.EMBEDDING_BAGS)
    torch.manual_seed(0)


def test_tables_are_those_of_the_benchmark() -> None:
    """Rows up to the cap, and keys of a sample."""
    assert len(bench_cases.TABLES) == 26
    assert sum(hotness for _, hotness in bench_cases.TABLES) == 214
    assert sum(rows for rows, _ in bench_cases.TABLES) == 204_184_588 - 5 * 35_000_000


def test_every_pass_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    tables = tuple((min(rows, 500), min(hotness, 4)) for rows, hotness in bench_cases.TABLES)
    monkeypatch.setattr(bench_cases, "TABLES", tables)
    lookups = sum(hotness for _, hotness in tables)
    for entry in bench_cases.entries():
        passes = entry.build(SAMPLES, torch.float16)
        assert [each.name for each in passes] == ["forward", "update", "sort"]
        for each in passes:
            each.run()
        said = capsys.readouterr().out.split()
        assert int(said[0]) == SAMPLES * lookups
        assert entry.name.split()[1] == said[1]
        vectors = SAMPLES * 26 * 128 * 2
        assert passes[0].bytes == int(said[4]) * 512 + SAMPLES * lookups * 4 + vectors
        assert passes[1].bytes == int(said[4]) * 2048 + SAMPLES * lookups * 8 + vectors


def test_skewed_keys_follow_their_law_and_the_others_of_a_bag_follow_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The shares of the first keys against the integral of the density, as the draw has it."""
    monkeypatch.setattr(bench_cases, "TABLES", ((1000, 5),))
    drawn = bench_cases.keys(20_000, skewed=True)
    assert drawn.min() >= 0
    assert drawn.max() < 1000
    order = torch.arange(1, 1002, dtype=torch.float64) ** -0.05
    expected = (order[:-1] - order[1:]) / (1 - order[-1])
    share = torch.bincount(drawn[:, 0], minlength=1000) / 20_000
    assert (share - expected).abs().max() < 5 * (0.25 / 20_000) ** 0.5
    bags = {tuple(bag) for bag in drawn.tolist()}
    assert len(bags) == len({bag[0] for bag in bags}) > 300
    assert torch.bincount(drawn[:, 1:].flatten(), minlength=1000).count_nonzero() > 500


def test_a_sweep_tries_tiles_of_its_table() -> None:
    pytest.importorskip("triton")
    for name, sweep in bench_cases.sweeps().items():
        tile = sweep.table[sweep.key]
        assert [tuple(type(tile)(*choice)) for choice in sweep.choices] == list(sweep.choices), name
