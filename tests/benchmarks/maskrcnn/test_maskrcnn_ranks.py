"""Mask R-CNN on several ranks: at different shapes in one step, and with a rank of its own that evaluates."""

from __future__ import annotations

import pytest
import torch

from benchmarks.maskrcnn.data import MaskData
from common import cli
from common.config.composition import compose
from common.data.batches import Block
from common.distributed.layout import Layout
from common.mlperf.parsed_log import read_log
from tests.conftest import suite

QUICK = [
    "benchmark.targets.BBOX.value=0.004", "benchmark.targets.SEGM.value=0.004", "benchmark.schedule.last_epoch=25",
    "hparams.global_batch_size=4", "hparams.warmup_steps=10", "hparams.warmup_factor=0.001", "precision=fp64",
]  # fmt: skip
"""Almost nothing is a success, so that one comes after a few epochs."""


def test_ranks_are_at_different_shapes_in_the_same_step(data_of):
    """So the contract's test that two ranks equal one that accumulates has such steps in it."""
    run, _ = cli.load(compose(["benchmark=maskrcnn", "scale=test", "device=cpu"]))
    data, keys = MaskData(run.workload.facts, run.workload.reader, torch.float32), []
    for rank in range(2):
        layout = Layout({"dp": 2, "pp": 1, "cp": 1, "tp": 1}, rank, seed=1234)
        source = data.open_train(data_of("maskrcnn"), layout, run.micro_batch, 2)
        keys.append([batch.key for batch in source.batches(Block(0, 1, 1, 0, 16))])
        source.close()
    assert len(keys[0]) == len(keys[1]) == 4
    assert any(mine != other for mine, other in zip(*keys, strict=True))


def test_a_rank_of_its_own_stops_the_run_at_the_epoch_of_an_evaluation_in_line(data_of, tmp_path):
    common = ["train", "benchmark=maskrcnn", "scale=test", "device=cpu", "seed=1", *QUICK]
    common.append(f"data_dir={data_of('maskrcnn')}")
    ways = {"inline": [], "beside": ["scale.gpus_per_node=2", "evaluation.ranks=1"]}
    found = {}
    for name, overrides in ways.items():
        done = suite(*common, *overrides, f"output_dir={tmp_path / name}")
        assert done.code == 0, done.errors
        found[name] = read_log(tmp_path / name / "mlperf.log").evaluations
    inline, beside = found["inline"], found["beside"][: len(found["inline"])]
    assert [point.progress for point in beside] == [point.progress for point in inline]
    for first, second in zip(inline, beside, strict=True):
        assert first.values == pytest.approx(second.values, rel=1e-6)
    assert len(inline) > 1
    assert min(inline[-1].values.values()) >= 0.004
