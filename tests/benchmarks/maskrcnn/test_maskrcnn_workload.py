"""Mask R-CNN as a workload: published recipes, what the rules fix, what is logged, batches as the loss takes them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes

from benchmarks.maskrcnn.config import Facts
from benchmarks.maskrcnn.data import MaskData
from benchmarks.maskrcnn.peer import build, noise, step_of
from benchmarks.maskrcnn.workload import MaskRCNNSegmentation
from common import cli
from common.config.composition import compose
from common.data.batches import Block, HostBatch
from common.detection.peer_step import BOXES
from common.distributed.layout import Layout
from common.errors import ConfigError
from common.mlperf.admission import admit
from common.mlperf.fixed import fixed_facts
from common.mlperf.parsed_log import read_log
from common.step.train_step import SAMPLES
from tests.benchmarks.recipes import recipes_of
from tests.capturable import Capturable
from tests.conftest import suite

SAMPLES_OF_COCO = 117_266


loaded, built = recipes_of("maskrcnn", MaskRCNNSegmentation)


# NVIDIA's submissions to MLPerf Training v3.1: ranks that train, pictures on each, learning rate, boundaries, steps and
# factor of the warm-up, candidates, ranks that evaluate.
PUBLISHED = {
    "8xH200": (8, 12, 0.12, [12000, 16000], 625, 1.92e-4, 12000, 0),
    "8xH100": (8, 12, 0.12, [12000, 16000], 625, 1.92e-4, 12000, 0),
    "64xH100": (64, 4, 0.24, [6125, 8000], 2300, 1.0434783e-4, 1000, 0),
    "384xH100": (256, 1, 0.24, [5625, 7500], 1800, 1.33e-4, 1000, 128),
}
# The reference's convergence points: global batch, learning rate, boundaries, steps and factor of the warm-up,
# candidates.
POINTS = {
    8: (0.01, [144000, 192000], 500, 2.0e-5, 1000),
    48: (0.06, [24000, 32000], 800, 9.6e-5, 6000),
    64: (0.08, [18000, 24000], 800, 1.0e-4, 6000),
    96: (0.12, [12000, 16000], 625, 1.92e-4, 6000),
    128: (0.16, [9000, 12000], 625, 2.56e-4, 6000),
    256: (0.24, [5625, 7500], 1800, 1.33e-4, 6000),
    272: (0.24, [5294, 7058], 1800, 1.33e-4, 6000),
}


@pytest.mark.parametrize("scale", list(PUBLISHED))
def test_a_recipe_has_the_published_hyperparameters_and_is_admitted(scale, tmp_path):
    ranks, pictures, rate, boundaries, warmup, factor, candidates, evaluating = PUBLISHED[scale]
    run, session = loaded(f"scale={scale}", f"assets_dir={tmp_path}", "ruleset=3.1.0")
    logged = admit(run, session).hyperparameters
    assert (run.training_ranks, run.micro_batch, run.evaluation.ranks) == (ranks, pictures, evaluating)
    assert (logged["global_batch_size"], logged["gradient_accumulation_steps"]) == (ranks * pictures, 1)
    assert (logged["opt_name"], logged["opt_base_learning_rate"]) == ("sgd_with_momentum", rate)
    assert list(logged["opt_learning_rate_decay_steps"]) == boundaries
    assert logged["opt_learning_rate_decay_factor"] == 0.1
    assert (logged["opt_learning_rate_warmup_steps"], logged["opt_learning_rate_warmup_factor"]) == (warmup, factor)
    assert (logged["num_image_candidates"], logged["min_image_size"], logged["max_image_size"]) == (
        candidates, 800, 1333,
    )  # fmt: skip
    assert run.workload.hparams.candidates_from == ("micro_batch" if candidates == 12000 else "picture")


@pytest.mark.parametrize("scale", [*PUBLISHED, "1xGPU", "1xH200", "2xH200", "4xH200"])
def test_every_recipe_keeps_what_the_rules_fix(scale, tmp_path):
    run, session = loaded(f"scale={scale}", f"assets_dir={tmp_path}")
    admission = admit(run, session)
    assert list(itertools.islice(admission.schedule.points(), 3)) == [1, 2, 3]
    assert run.declaration.forbidden == []
    assert (run.benchmark.train_samples, run.benchmark.eval_samples) == (SAMPLES_OF_COCO, 5000)
    assert {name: target.value for name, target in run.benchmark.targets.items()} == {"BBOX": 0.377, "SEGM": 0.339}
    if not scale.endswith("GPU"):
        assert run.global_batch == (96 if run.micro_batch == 12 else 256)


@pytest.mark.parametrize("batch", list(POINTS))
def test_the_references_points_can_be_run(batch, tmp_path):
    rate, boundaries, warmup, factor, candidates = POINTS[batch]
    micro_batch = candidates // 1000
    scale = "scale=1xH200"
    if batch % micro_batch:  # 6 pictures of a rank do not divide it: the rules' 1,000 of each then
        micro_batch, candidates = 1, 1000
    run, session = loaded(
        scale, f"hparams=maskrcnn/rcp_{batch}", f"micro_batch={micro_batch}",
        f"hparams.image_candidates={candidates}", f"assets_dir={tmp_path}",
    )  # fmt: skip
    logged = admit(run, session).hyperparameters
    assert (logged["global_batch_size"], logged["opt_base_learning_rate"]) == (batch, rate)
    assert list(logged["opt_learning_rate_decay_steps"]) == boundaries
    assert (logged["opt_learning_rate_warmup_steps"], logged["opt_learning_rate_warmup_factor"]) == (warmup, factor)


def test_there_is_an_example_of_every_shape_that_batches_are_padded_to():
    workload = built()
    examples = list(workload.example_batches())
    assert [batch.key for batch in examples] == list(workload.own.reader.shapes)
    for batch in examples:
        assert batch.tensors["image"].shape[2:] == batch.key
        assert batch.tensors["image"].is_contiguous(memory_format=torch.channels_last)
        assert all(value.isfinite() for value in workload.loss(batch).metrics.values())
    with pytest.raises(ConfigError, match="at least one height and width"):
        next(iter(built("reader.shapes=[]").example_batches()))


def host_batch(workload: MaskRCNNSegmentation, real: list[bool], objects: int) -> HostBatch:
    """A batch as a reader delivers it: noise, and in the slots that count so many boxes each."""
    pictures, side, capacity = len(real), workload.own.facts.longest_side, workload.own.reader.max_boxes
    generator = torch.Generator().manual_seed(1)
    boxes = torch.zeros((pictures, capacity, 4))
    boxes[:, :objects] = torch.tensor([5.0, 6.0, 40.0, 30.0])
    tensors = {
        "pixels": torch.randint(256, (pictures, side, side, 3), generator=generator).to(torch.uint8),
        "decoded_size": torch.tensor([[48, 64]] * pictures, dtype=torch.int32),
        "size": torch.tensor([[64.0, 85.0]] * pictures),
        "boxes": boxes,
        "label": torch.ones((pictures, capacity), dtype=torch.int64),
        "count": torch.tensor([objects if one else 0 for one in real]),
        "object": torch.zeros(pictures, dtype=torch.int64),
        "transform": torch.tensor([[85 / 64, 64 / 48, 1.0, 64.0]] * pictures),
        "real": torch.tensor(real),
        "seed": torch.tensor([17]),
    }
    return HostBatch(tensors, pictures, 0, (64, 96))


def test_batches_are_prepared_as_the_loss_takes_them():
    workload = built()
    example = next(batch for batch in workload.example_batches() if batch.key == (64, 96))
    batch = workload.prepare(host_batch(workload, [True, True], 2))
    assert batch.key == example.key
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in batch.tensors.items()} == {
        name: (tensor.shape, tensor.dtype) for name, tensor in example.tensors.items()
    }


def test_a_surplus_slot_is_no_sample():
    workload = built()
    losses = workload.loss(workload.prepare(host_batch(workload, [True, False], 1)))
    assert losses.metrics[SAMPLES] == 1


def test_losses_of_fresh_heads_are_those_of_guessing():
    """Cross-entropy of even odds and of K + 1 equal classes; offsets near 0 for boxes that are not far off."""
    workload = built("benchmark.facts.classes=80")
    example = next(iter(workload.example_batches()))
    found = workload.loss(example).metrics
    assert found["loss_objectness"].item() == pytest.approx(0.693, abs=0.05)
    assert found["loss_classifier"].item() == pytest.approx(4.394, abs=0.2)
    assert found["loss_mask"].item() == pytest.approx(0.72, abs=0.12)
    assert found["loss_rpn_box_reg"] < 0.3
    assert found["loss_box_reg"] < 0.3


def unwatched(function: Callable[..., Any]) -> Callable[..., Any]:
    """Exclude a reference, which a kernel replaces on a GPU, from the check."""

    def run(*args: Any) -> Any:
        with _disable_current_modes():
            return function(*args)

    return run


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_a_graph_can_hold_the_step(precision):
    workload = built(f"precision={precision}")
    iteration = workload._pass
    iteration._draw = unwatched(iteration._draw)
    for targets in (iteration._rpn_targets, iteration._roi_targets):
        targets._matched._match = unwatched(targets._matched._match)
    step, examples = workload.build_step(), list(workload.example_batches())
    with Capturable():
        step((examples * workload.cfg.grad_accumulation_steps)[: workload.cfg.grad_accumulation_steps])


def test_biases_have_their_own_rate():
    _, biases = built().parameter_groups()
    # 0.02 and 0.04 less 39 times 4e-4
    assert biases.schedule(torch.tensor(0)).item() == pytest.approx(0.04 - 39 * 4e-4)


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


@pytest.mark.slow
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


def test_an_iteration_trains_as_many_parameters_as_the_rules_network_has():
    torch.manual_seed(0)
    facts, cpu, shape = fixed_facts(Facts, "maskrcnn"), torch.device("cpu"), (64, 96)
    model = build(facts, shape, cpu)
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == 44_125_173
    frozen = [p for p in model.parameters() if not p.requires_grad]
    before = [p.clone() for p in frozen]
    pictures, targets = noise(facts, shape, 1, cpu)
    assert step_of(model, pictures, targets, cpu)().isfinite()
    assert all(torch.equal(p, was) for p, was in zip(frozen, before, strict=True))


def test_masks_lie_in_their_boxes():
    facts, shape = fixed_facts(Facts, "maskrcnn"), (96, 128)
    (target,) = noise(facts, shape, 1, torch.device("cpu"))[1]
    assert target["masks"].shape == (BOXES, *shape)
    for (left, top, right, bottom), mask in zip(target["boxes"].tolist(), target["masks"], strict=True):
        rows, columns = mask.nonzero(as_tuple=True)
        assert left <= columns.min()
        assert columns.max() <= right
        assert top <= rows.min()
        assert rows.max() <= bottom
