"""SSD300 as a workload: published recipes, learning rate, what the rules fix, and what is logged."""

import itertools

import pytest
import torch

from benchmarks.ssd300.schedule import decay_steps, warmup_steps, warmup_then_falls
from benchmarks.ssd300.workload import Ssd300Detection
from common.data.batches import HostBatch
from common.errors import CheckpointError, ConfigError
from common.mlperf.admission import admit
from common.mlperf.events import hyperparameters
from common.mlperf.verdict import judge
from tests.benchmarks.recipes import recipes_of
from tests.capturable import Capturable
from tests.submission import closed_logs

SAMPLES = 117_266


loaded, built = recipes_of("ssd300", Ssd300Detection)


# NVIDIA's submissions to MLPerf Training v1.1: ranks, pictures on each, learning rate, weight decay, boundaries, steps
# of the warm-up, span of batch norm.
PUBLISHED = {
    "8xH200": (8, 114, 0.003157 * 912 / 32, 1.3e-4, [44, 55], 642, 114),
    "8xH100": (8, 114, 0.003157 * 912 / 32, 1.3e-4, [44, 55], 642, 114),
    "64xH100": (64, 24, 0.192, 1.7e-4, [48, 60], 1145, 48),
    "1024xA100": (1024, 3, 0.384, 4e-5, [68, 85], 1336, 24),
}


@pytest.mark.parametrize("scale", list(PUBLISHED))
def test_a_recipe_has_the_published_hyperparameters_and_is_admitted(scale, tmp_path):
    ranks, pictures, rate, decay, boundaries, warmup, span = PUBLISHED[scale]
    run, session = loaded(f"scale={scale}", f"assets_dir={tmp_path}", "ruleset=1.1.0")
    logged = admit(run, session).hyperparameters
    assert (run.world_size, run.micro_batch, run.precision) == (ranks, pictures, "fp16")
    assert (logged["global_batch_size"], logged["gradient_accumulation_steps"]) == (ranks * pictures, 1)
    assert logged["opt_base_learning_rate"] == pytest.approx(rate, rel=1e-12)
    assert (logged["opt_weight_decay"], logged["opt_momentum"]) == (decay, 0.9)
    assert list(logged["opt_learning_rate_decay_boundary_epochs"]) == boundaries
    assert (logged["opt_learning_rate_warmup_steps"], logged["opt_learning_rate_warmup_factor"]) == (warmup, 0)
    assert (logged["model_bn_span"], logged["max_samples"]) == (span, 1)


@pytest.mark.parametrize("scale", [*PUBLISHED, "1xGPU", "1xH200", "2xH200", "4xH200"])
def test_every_recipe_keeps_what_the_rules_fix(scale, tmp_path):
    run, session = loaded(f"scale={scale}", f"assets_dir={tmp_path}")
    admission = admit(run, session)
    schedule = admission.schedule
    assert list(itertools.islice(schedule.points(), 4)) == [5, 10, 15, 20]
    assert run.declaration.forbidden == []
    assert len(run.declaration.initialised_tensors) == 119
    assert (
        run.benchmark.train_samples,
        run.benchmark.eval_samples,
        run.benchmark.targets["mean_average_precision"].value,
    ) == (SAMPLES, 5000, 0.23)
    assert admission.rules.log_name == "ssd"


def test_one_gpu_accumulates_nvidias_batch():
    run, _ = loaded("scale=1xH200")
    assert (run.micro_batch, run.grad_accumulation_steps, run.global_batch) == (114, 8, 912)


def test_the_references_point_can_be_run(tmp_path):
    run, session = loaded("scale=8xH200", "hparams=ssd300/reference_1024", "micro_batch=128", f"assets_dir={tmp_path}")
    logged = admit(run, session).hyperparameters
    assert logged["opt_base_learning_rate"] == pytest.approx(2.5e-3 * 1024 / 32)
    assert (logged["opt_learning_rate_warmup_steps"], logged["max_samples"]) == (300, 50)
    assert list(logged["opt_learning_rate_decay_boundary_epochs"]) == [40, 50]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("hparams.crop_attempts=10", "expected one of 1, 50"),
        ("hparams.decay_epochs=[55,44]", "ascending"),
        ("benchmark.schedule.last_epoch=abc", "last_epoch"),
        ("hparams.bn_group=0", "at least 1"),
    ],
)
def test_impossible_settings_are_refused(override, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        admit(*loaded("scale=8xH200", f"assets_dir={tmp_path}", override))


def test_a_backbone_of_another_network_is_one_error(tmp_path):
    torch.save({"conv1.weight": torch.zeros(8, 3, 7, 7)}, tmp_path / "backbone.pth")
    with pytest.raises(CheckpointError, match="another architecture"):
        built(f"assets_dir={tmp_path}")


def plain_rates(base, boundaries, samples, batch, warmup, variant, factor, steps):
    """The rates of the first ``steps`` updates, as loops over epochs and iterations set them.

    The reference sets the rate at the start of an epoch of the schedule and in each iteration of the warm-up; otherwise
    it stays as it was. NVIDIA's is computed for every iteration.
    """
    rates, seen, epochs, base_now, rate = [], 0, 0, base, base
    for iteration in range(steps):
        while epochs <= seen // samples:
            if epochs in boundaries:
                rate = base_now = base_now * 0.1
            epochs += 1
        count = iteration + (variant == "nvidia")
        if count < warmup:
            rate = base_now - (warmup - count) * base_now / (warmup * 2**factor)
        elif variant == "nvidia":
            rate = base_now
        rates.append(rate)
        seen += batch
    return rates


@pytest.mark.parametrize("variant", ["nvidia", "reference"])
@pytest.mark.parametrize(
    ("warmup_epochs", "boundaries", "factor"),
    [(2.5, [4, 5], 0), (2.5, [4, 5], 2), (4.5, [4, 5], 0), (5.5, [4, 5], 0), (4.032, [4, 5], 1), (0, [4, 5], 0)],
)
def test_the_learning_rate_is_that_of_a_plain_loop(variant, warmup_epochs, boundaries, factor):
    samples, batch = 1000, 64
    warmup = warmup_steps(warmup_epochs, samples, batch)
    assert warmup == int(warmup_epochs * 15.625)
    schedule = warmup_then_falls(
        0.4, decay_steps(boundaries, samples, batch), 0.1, warmup, factor, first_step=1 if variant == "nvidia" else 0
    )
    found = [schedule(torch.tensor(step)).item() for step in range(100)]
    assert found == pytest.approx(plain_rates(0.4, boundaries, samples, batch, warmup, variant, factor, 100), rel=1e-6)


@pytest.mark.parametrize(("variant", "inside"), [("nvidia", True), ("reference", False)])
def test_everything_decays_and_the_variant_says_where_the_rate_is(variant, inside):
    workload = built(f"hparams.variant={variant}", "hparams.weight_decay=0.0005")
    [group] = workload.parameter_groups()
    assert group.parameters.keys() == dict(workload.model.named_parameters()).keys()
    assert (group.weight_decay, group.learning_rate_in_momentum) == (0.0005, inside)


def test_batches_are_prepared_as_the_loss_takes_them_with_boxes_or_without():
    workload = built()
    [example] = workload.example_batches()
    boxes = len(example.tensors["class"][0])
    host = HostBatch(
        {
            "image": example.tensors["image"],
            "boxes": torch.zeros((4, 5, 4)),
            "label": torch.zeros((4, 5), dtype=torch.int64),
            "count": torch.zeros(4, dtype=torch.int64),
        },
        4,
        0,
    )
    batch = workload.prepare(host)
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in batch.tensors.items()} == {
        name: (tensor.shape, tensor.dtype) for name, tensor in example.tensors.items()
    }
    assert batch.tensors["offsets"].shape == (4, boxes, 4)
    losses = workload.loss(batch)
    assert losses.total.item() == 0
    losses.total.backward()
    assert all(parameter.grad.isfinite().all() for parameter in workload.model.parameters())
    losses = workload.loss(example)
    assert losses.total.item() == pytest.approx(
        (losses.metrics["classification_loss"] + losses.metrics["box_loss"]).item()
    )


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_a_graph_can_hold_the_step(precision):
    workload = built(f"precision={precision}")
    step, [example] = workload.build_step(), workload.example_batches()
    with Capturable():
        step([example] * workload.cfg.grad_accumulation_steps)


def test_the_weights_that_are_evaluated_are_parameters_and_statistics():
    workload = built()
    named = dict(workload.model.named_parameters()) | dict(workload.model.named_buffers())
    assert workload.weights().tensors.keys() == named.keys()


def test_a_log_with_our_keys_and_tensors_is_a_valid_run_of_the_closed_division(tmp_path, monkeypatch):
    """Evaluations every 5 epochs up to the 50th, the hyperparameters of the recipe of 8 GPUs, and its 119 tensors."""
    run, _ = loaded("scale=8xH200", f"assets_dir={tmp_path}")
    given = {key: value for key, value in hyperparameters(run).items() if key != "gradient_accumulation_steps"}
    recipe = closed_logs.Recipe("ssd", "1.1.0", 5, 50.0, 0.0, 5, 5, 1, 1, 0.22, 0.2305, SAMPLES, 5000, given)
    monkeypatch.setitem(closed_logs.RECIPES, "ssd", recipe)
    lines = closed_logs.closed_log("ssd", seed=1).splitlines(keepends=True)
    at = next(index for index, line in enumerate(lines) if '"init_start"' in line) + 1
    kind, time_ms = closed_logs.POINT, 1_700_000_000_001
    tensors = [
        closed_logs.event(time_ms, kind, "weights_initialization", None, tensor=name) + "\n"
        for name in run.declaration.initialised_tensors
    ]
    for dropped, expected in ((0, "valid"), (1, "refused")):
        log = tmp_path / f"{expected}.log"
        log.write_text("".join([*lines[:at], *tensors[dropped:], *lines[at:]]))
        verdict = judge(log, "1.1.0")
        assert verdict.kind.startswith(expected), verdict.reasons
    assert "initialized_tensors" in " ".join(verdict.reasons)
