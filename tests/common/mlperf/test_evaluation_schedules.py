"""Evaluation points against the rules' table and its worked examples."""

import math
from fractions import Fraction
from itertools import islice

import pytest

from common import cli
from common.config.composition import compose
from common.data.batches import Block
from common.errors import ConfigError
from common.mlperf.rules import BENCHMARKS
from common.mlperf.schedules import SCHEDULES, Schedule

# benchmark, global batch, options -> first points; worked by hand from the rules' formulas
EXAMPLES = [
    ("resnet", 3200, {}, [3, 7, 11, 15]),
    ("resnet", 3200, {"first_epoch": 1}, [1, 5, 9, 13]),
    ("resnet", 3200, {"first_epoch": 4}, [4, 8, 12, 16]),
    ("resnet", 64, {"first_epoch": 1, "interval": 1}, [1, 2, 3, 4]),
    ("ssd300", 1024, {}, [5, 10, 15, 20]),
    ("ssd300", 1024, {"ruleset": "0.7.0"}, [40, 50, 55, 60, 65, 70, 75, 80]),
    ("retinanet", 256, {}, [1, 2, 3]),
    ("maskrcnn", 96, {}, [1, 2, 3]),
    ("rnnt", 1024, {}, [1, 2, 3]),
    ("minigo", 1, {}, [1, 2, 3]),
    ("cosmoflow", 64, {}, [1, 2, 3]),
    ("deepcam", 64, {}, [1, 2, 3]),
    ("oc20", 256, {}, [1, 2, 3]),
    ("unet3d", 56, {}, [1000, 1020, 1040]),  # 56 divides 168
    ("unet3d", 32, {}, [875, 893, 911]),  # S = 192: ceil(875), ceil(17.5)
    ("unet3d", 80, {}, [700, 714, 728]),  # S = 240
    ("bert", 768, {}, [150000, 300000, 450000]),  # the rules' example: 158,840 down to 150,000
    ("bert", 448, {}, [150000, 300000]),  # 155,157
    ("bert", 3072, {}, [175000, 350000]),  # 185,363
    ("bert", 16384, {}, [325000, 650000]),  # 338,604
    ("bert", 256, {"ruleset": "0.7.0"}, [3000000, 3500000, 4000000]),
    ("dlrm_dcnv2", 55296, {}, [3793 * 55296, 2 * 3793 * 55296]),
    ("dlrm_dcnv2", 65536, {}, [3200 * 65536]),
    ("dlrm_dcnv2", 135168, {}, [1551 * 135168]),
    ("dlrm", 55296, {}, [3793 * 55296]),
    ("dlrm", 71680, {}, [2926 * 71680]),
    ("dlrm", 8, {"train_samples": 500, "last_samples": 48}, [24, 48]),  # floor(3.125) batches
    ("gpt3", 1536, {}, [24576, 49152]),
    ("gpt3", 3584, {}, [7 * 3584, 14 * 3584]),  # ceil(6.86) steps
    ("gpt3", 16, {"interval": 60}, [64, 128]),  # of synthetic data
    ("llama2_70b_lora", 8, {}, [1536, 1920, 2304]),  # the rules' example
    ("llama2_70b_lora", 64, {}, [11 * 384, 12 * 384]),  # skips 10
    ("llama2_70b_lora", 100, {}, [15 * 400, 16 * 400]),  # skips floor(14.5), intervals of whole batches
    ("llama31_405b", 1152, {}, [15 * 18432, 16 * 18432]),  # skips floor(14.995)
    ("llama31_405b", 2304, {}, [18 * 18432]),  # skips floor(17.99)
    ("llama31_405b", 1152, {"ruleset": "5.0.0"}, [46080, 92160]),
    ("llama31_8b", 32, {}, [12288, 24576]),
    ("llama31_8b", 36, {}, [12312, 24624]),  # ceil(12288 / 36) = 342 steps
    ("llama31_8b", 32, {"interval": 1000}, [1024, 2048]),
    ("gpt_oss_20b", 5000, {}, [15000, 30000]),
    ("stable_diffusion", 512, {}, [512000, 1024000]),
    ("stable_diffusion", 384, {}, [512256, 1024512]),  # ceil(1333.3) batches
    ("stable_diffusion", 32, {"interval": 100}, [128, 256]),
    ("stable_diffusion", 16, {"interval": 60}, [64, 128]),  # of synthetic data
    ("deepseekv3_671b", 4096, {"ruleset": "6.0.0"}, [4096, 8192]),
    ("deepseekv3_671b", 16384, {}, [43 * 16384, 44 * 16384]),  # floor(42 + 1.5)
    ("flux1", 1024, {}, [262144, 524288]),
    ("flux1", 1000, {}, [263000, 526000]),
    ("flux1", 2304, {}, [262656, 525312]),  # 114 batches, as in published logs
    ("flux1", 16, {"interval": 1000}, [1008, 2016]),
    ("rgat", 16384, {"ranks": 8}, [288 * 16384, 576 * 16384]),
    ("rgat", 65536, {"ranks": 64}, [72 * 65536]),
    ("rgat", 262144, {"ranks": 512}, [18 * 262144]),
    ("rgat", 32768, {"ranks": 8}, [144 * 32768]),
    ("openfold", 256, {}, [10240, 20480]),
]


@pytest.mark.parametrize(("name", "batch", "options", "points"), EXAMPLES)
def test_points_of_the_rules(name, batch, options, points):
    schedule = SCHEDULES[name](batch, **options)
    assert list(islice(schedule.points(), len(points))) == points


def test_every_benchmark_of_the_table_has_a_schedule_and_an_example():
    not_in_the_table = {"gnmt", "transformer", "dlrmv4", "qwen35_397b_grpo"}
    assert set(SCHEDULES) == set(BENCHMARKS) - not_in_the_table
    assert {name for name, *_ in EXAMPLES} == set(SCHEDULES)


@pytest.mark.parametrize("batch", [32, 48, 80, 256, 448, 768, 1536, 3072, 5888, 8192, 16384])
def test_bert_interval_is_the_formula_in_exact_arithmetic(batch):
    exact = Fraction(5, 100) * (Fraction(23023, 100) * batch + 3_000_000)
    assert SCHEDULES["bert"](batch).interval == math.floor(exact / 25_000) * 25_000


@pytest.mark.parametrize("batch", [1152, 1440, 2304, 4608, 9216, 5000])
def test_llama31_405b_skips_the_formula_in_exact_arithmetic(batch):
    schedule = SCHEDULES["llama31_405b"](batch)
    assert schedule.first == (math.floor(Fraction(26, 10_000) * batch + 12) + 1) * schedule.interval


def test_unet3d_fails_after_ten_thousand_nominal_epochs():
    assert SCHEDULES["unet3d"](56).last == 10000
    assert SCHEDULES["unet3d"](32).last == 8750  # S = 192
    assert list(SCHEDULES["unet3d"](56).points())[-1] == 10000


def test_dlrm_evaluates_twenty_times_within_the_epoch():
    for batch in (32768, 55296, 65536, 102400, 135168):
        points = list(SCHEDULES["dlrm_dcnv2"](batch).points())
        assert len(points) == 20
        assert points[-1] <= 4_195_197_692


def test_dlrm_needs_a_batch_for_each_evaluation():
    assert list(SCHEDULES["dlrm"](8, train_samples=160, last_samples=20).points()) == [8, 16]
    with pytest.raises(ValueError, match="fewer than 20 batches of 8"):
        SCHEDULES["dlrm"](8, train_samples=159)


def test_points_of_rgat_restart_in_each_epoch():
    schedule = SCHEDULES["rgat"](16384, ranks=8, last_epoch=2)
    steps = [point // 16384 for point in schedule.points()]
    assert steps == [288 * k for k in range(1, 21)] + [5775 + 288 * k for k in range(1, 21)]


def test_last_ends_the_points():
    schedule = SCHEDULES["resnet"](3200, last_epoch=37)
    assert list(schedule.points()) == [3, 7, 11, 15, 19, 23, 27, 31, 35]


def test_blocks_of_epochs_are_the_training_between_evaluations():
    blocks = list(SCHEDULES["resnet"](32, first_epoch=3, last_epoch=12).blocks(1000, 32))
    assert blocks == [
        Block(index=0, first_epoch=1, epochs=3, start_sample=0, samples=3000),
        Block(index=1, first_epoch=4, epochs=4, start_sample=3000, samples=4000),
        Block(index=2, first_epoch=8, epochs=4, start_sample=7000, samples=4000),
    ]


def test_blocks_of_unet3d_count_the_padded_epoch():
    first, second = islice(SCHEDULES["unet3d"](32).blocks(168, 32), 2)
    assert (first.epochs, first.samples) == (875, 875 * 192)
    assert (second.first_epoch, second.epochs, second.start_sample) == (876, 18, 875 * 192)


def test_blocks_of_samples_end_with_the_batch_that_holds_the_point():
    blocks = list(islice(SCHEDULES["bert"](768).blocks(400_000, 768), 3))
    ends = [150_528, 300_288, 450_048]  # multiples of 768 at or above 150,000, 300,000, 450,000
    assert [block.start_sample + block.samples for block in blocks] == ends
    assert [block.start_sample for block in blocks] == [0, *ends[:2]]
    assert [block.first_epoch for block in blocks] == [1, 1, 1]
    assert all(block.epochs == 0 and block.samples % 768 == 0 for block in blocks)


def test_blocks_of_samples_name_the_epoch_that_they_start_in():
    blocks = islice(Schedule(100, 100, None, "samples").blocks(train_samples=150, global_batch=50), 4)
    assert [block.first_epoch for block in blocks] == [1, 1, 2, 3]


@pytest.mark.parametrize("first", [0, 5])
def test_resnet_offset_outside_the_rules_is_an_error(first):
    with pytest.raises(ValueError, match=r"1\.\.4"):
        SCHEDULES["resnet"](3200, first_epoch=first)


def test_impossible_schedules_are_errors():
    with pytest.raises(ValueError, match="no evaluation falls before the end"):
        SCHEDULES["resnet"](3200, first_epoch=4, last_epoch=3)
    with pytest.raises(ValueError, match="positive"):
        Schedule(1, 0, None, "epoch")
    with pytest.raises(ValueError, match="closer than a batch"):
        list(Schedule(10, 10, 100, "samples").blocks(1000, 64))
    with pytest.raises(ValueError, match="too few"):
        SCHEDULES["rgat"](1024, train_samples=10_000)
    with pytest.raises(ValueError, match="does not divide"):
        SCHEDULES["rgat"](1000, ranks=3)


@pytest.mark.parametrize("name", ["maskrcnn", "resnet", "retinanet", "rnnt", "ssd300", "unet3d"])
def test_a_global_batch_fits_into_an_epoch(name):
    tree = compose([f"benchmark={name}", "scale=test", "device=cpu"])
    batch, samples = tree["hparams"]["global_batch_size"], tree["benchmark"]["train_samples"]
    tree["hparams"]["global_batch_size"] = samples // batch * batch
    cli.admitted(tree)
    tree["hparams"]["global_batch_size"] += batch
    with pytest.raises(ConfigError, match=f"hparams.global_batch_size={samples // batch * batch + batch}: .*{samples}"):
        cli.admitted(tree)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("unet3d", {"last_epoch": 0}),
        ("unet3d", {"first_epoch": 0}),
        ("ssd300", {"ruleset": "0.7.0", "last_epoch": 0}),
        ("gpt3", {"interval": 0}),
        ("stable_diffusion", {"interval": 0}),
    ],
)
def test_zero_is_no_default(name, options):
    with pytest.raises(ValueError, match=r"positive first point|no evaluation falls before the end"):
        SCHEDULES[name](4, **options)


def test_a_generation_is_a_block_of_unknown_size():
    blocks = list(SCHEDULES["minigo"](4096, last_generation=3).blocks(1000, 4096))
    assert blocks == [Block(index, index + 1, 1, 0, 0) for index in range(3)]
