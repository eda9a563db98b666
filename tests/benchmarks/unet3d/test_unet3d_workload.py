"""3D U-Net as a workload: published recipes, learning rate, groups of parameters, and what its log counts."""

import itertools
import json

import pytest
import torch

from benchmarks.unet3d.workload import UNet3DSegmentation
from common.data.batches import Block
from common.distributed.layout import Layout
from common.errors import ConfigError, UnsupportedImplementation
from common.mlperf.admission import admit, evaluation_schedule
from common.mlperf.parsed_log import read_log
from tests.benchmarks.recipes import recipes_of
from tests.benchmarks.unet3d.small_volumes import with_objects, write_volumes
from tests.conftest import suite

loaded, built = recipes_of("unet3d", UNet3DSegmentation)


# NVIDIA's configurations in the results of MLPerf Training v3.1 and v4.0: training GPUs, GPUs of a crop, crops of a
# step on them, GPUs that evaluate, global batch, learning rate, epochs of warm-up.
PUBLISHED = {
    "8xH200": (8, 1, 7, 0, 56, 2.0, 1000),
    "8xH100": (8, 1, 7, 0, 56, 2.0, 1000),
    "72xH100": (56, 1, 1, 16, 56, 2.0, 1000),
    "768xH100": (672, 8, 1, 96, 84, 1.5, 1500),
}


@pytest.mark.parametrize("scale", list(PUBLISHED))
def test_a_recipe_has_the_published_hyperparameters(scale):
    training, of_a_crop, crops, evaluating, batch, rate, warmup = PUBLISHED[scale]
    run, session = loaded(f"scale={scale}")
    logged = admit(run, session).hyperparameters
    assert (run.training_ranks, run.layout["cp"], run.evaluation.ranks) == (training, of_a_crop, evaluating)
    assert (run.micro_batch, logged["gradient_accumulation_steps"]) == (crops, 1)
    assert logged["global_batch_size"] == batch
    assert logged["opt_base_learning_rate"] == rate
    assert logged["opt_initial_learning_rate"] == 1e-4
    assert logged["opt_learning_rate_warmup_epochs"] == warmup
    assert (logged["opt_momentum"], logged["opt_weight_decay"]) == (0.9, 0.0)
    assert logged["opt_learning_rate_decay_boundary_epochs"] == []
    assert (logged["oversampling"], logged["validation_overlap"]) == (0.4, 0.5)
    assert list(logged["training_input_shape"]) == list(logged["validation_input_shape"]) == [128, 128, 128]
    assert logged["samples_per_epoch"] == 168


@pytest.mark.parametrize(
    ("published", "brightest", "noise"),
    [  # the reference: 1 + f of f up to 1.3, deviations up to 0.1; NVIDIA: f, and 0.1
        ("reference_2", (1.7, 2.3), (0.0, 0.1)),
        ("rcp_28", (1.7, 2.3), (0.0, 0.1)),
        ("nvidia_v4.0_56", (0.7, 1.3), (0.1, 0.1)),
        ("nvidia_v4.0_84", (0.7, 1.3), (0.1, 0.1)),
    ],
)
def test_a_hyperparameter_set_selects_its_augmentation(tmp_path, published, brightest, noise):
    run, _ = loaded("scale=test", "hparams.global_batch_size=4", f"hparams=unet3d/{published}",
                    "benchmark.facts.brightness_probability=1", "benchmark.facts.noise_probability=1")  # fmt: skip
    workload = UNet3DSegmentation(run, Layout(run.layout, seed=3))
    root = write_volumes(tmp_path / "data", [with_objects((64, 32, 32), number) for number in range(4)], (64, 32, 32))
    source = workload.open_data(root)
    drawn = torch.cat([batch.tensors["intensities"] for batch in source.batches(Block(0, 1, 20, 0, 80))])
    source.close()
    for values, (low, high) in zip(drawn.unbind(1), (brightest, noise), strict=True):
        margin = 0.2 * (high - low) + 1e-6
        assert low - 1e-6 <= values.min() < low + margin
        assert high - margin < values.max() <= high + 1e-6


@pytest.mark.parametrize(
    ("batch", "first", "second"),
    [(56, 1000, 1020), (84, 1000, 1020), (32, 875, 893), (80, 700, 714)],  # rules: of epochs of whole batches
)
def test_evaluations_follow_the_rules_epochs(batch, first, second):
    run, _ = loaded("scale=1xH200", f"hparams.global_batch_size={batch}", "micro_batch=1")
    assert list(itertools.islice(evaluation_schedule(run).points(), 2)) == [
        first,
        second,
    ]


def test_the_learning_rate_after_60_steps_is_that_of_nvidias_log():
    run, _ = loaded("scale=8xH200", "scale.gpus_per_node=1", "hparams.global_batch_size=56", "scale.gpu=false",
                    "benchmark.facts.filters=[2,2,2,2,2]")  # fmt: skip
    workload = UNet3DSegmentation(run, Layout(run.layout))
    (optimizer,) = workload.build_step().updaters
    # The v4.0 log of 8 x H200 reports 0.0530775 after 60 steps; the next step is the first that is done with it.
    assert float(optimizer._schedule(torch.tensor(59))) == pytest.approx(0.0530775, abs=5e-8)


@pytest.mark.parametrize(
    ("overrides", "kind", "message"),
    [
        (["layout.tp=2", "scale.gpus_per_node=2"], ConfigError, "layout.tp=2: 3D U-Net's ranks"),
        (
            ["model.implementations.dice_cross_entropy=triton"],
            UnsupportedImplementation,
            "model.implementations.dice_cross_entropy=triton: .*a GPU",
        ),
    ],
)
def test_errors_name_the_invalid_setting(overrides, kind, message):
    run, _ = loaded("scale=test", *overrides)
    with pytest.raises(kind, match=f"^{message}"):
        UNet3DSegmentation(run, Layout(run.layout))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("benchmark.facts.input_shape=[32,32,32]", "a single voxel"),
        ("benchmark.facts.input_shape=[64,48,64]", "multiples of 32"),
        ("benchmark.facts.classes=4", "3: background, kidney and tumour"),
        ("hparams.momentum=1", "below 1"),
        ("sliding_window.batch=0", "at least 1"),
    ],
)
def test_the_error_for_a_value_out_of_range_names_it(override, message):
    key = override.partition("=")[0]
    with pytest.raises(ConfigError, match=rf"^{key}=.*{message}"):
        loaded("scale=test", override)


def test_without_a_split_no_parameter_is_redundant():
    (group,) = built().parameter_groups()
    assert len(group.parameters) == 78
    assert group.replicated_over == ()


def test_the_log_has_the_initialisation_of_every_layer():
    run, _ = loaded("scale=test")
    names = run.declaration.initialised_tensors
    assert len(set(names)) == len(names) == 50  # 22 convolutions, 22 norms, 5 transposed convolutions, the output


@pytest.mark.slow_cases("4.0.0-8")
@pytest.mark.parametrize(("ruleset", "unit"), [("3.0.0", 1), ("4.0.0", 8)])
def test_the_log_counts_in_the_unit_of_the_ruleset(ruleset, unit, data_of, tmp_path):
    # Reference points of v3.1 and v4.0 are in samples, of 8 volumes an epoch here; those before in epochs.
    done = suite("train", "benchmark=unet3d", "scale=test", "device=cpu", f"ruleset={ruleset}",
                 f"data_dir={data_of('unet3d')}", f"output_dir={tmp_path}")  # fmt: skip
    assert done.code == 10, done.errors
    log = read_log(tmp_path / "mlperf.log")
    assert [point.progress for point in log.evaluations] == [2 * unit, 3 * unit, 4 * unit]
    assert log.all("run_stop")[0].metadata["epoch_num"] == 4 * unit
    blocks = [event.metadata for event in log.all("block_start")]
    assert [(block["first_epoch_num"], block["epoch_count"]) for block in blocks] == [
        (unit, 2 * unit), (3 * unit, unit), (4 * unit, unit),
    ]  # fmt: skip
    assert len(log.all("tracked_stats")) == (4 if unit == 1 else 3)  # of epochs, or of blocks


@pytest.mark.slow
def test_an_evaluation_rank_gives_the_scores_of_an_inline_evaluation(data_of, tmp_path):
    common = ["train", "benchmark=unet3d", "scale=test", "device=cpu", "seed=7",
              "benchmark.schedule.last_epoch=3", f"data_dir={data_of('unet3d')}"]  # fmt: skip
    layouts = {"inline": ["scale.gpus_per_node=2"], "beside": ["scale.gpus_per_node=3", "evaluation.ranks=1"]}
    for name, overrides in layouts.items():
        done = suite(*common, *overrides, f"output_dir={tmp_path / name}")
        assert done.code == 10, done.errors
    inline, beside = (read_log(tmp_path / name / "mlperf.log").evaluations for name in layouts)
    assert [point.progress for point in inline] == [point.progress for point in beside] == [16, 24]
    for first, second in zip(inline, beside, strict=True):
        assert first.values == pytest.approx(second.values, rel=1e-6)
    assert inline[0].values != pytest.approx(inline[1].values, rel=0.1), "old weights would score alike"
    entries = [json.loads(line) for line in (tmp_path / "beside" / "evaluations.jsonl").read_text().splitlines()]
    assert len(entries) == 2
    assert all(entry["seconds"] > 0 for entry in entries)
