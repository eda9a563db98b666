"""Test RNN-T's recipes, the values that the rules fix, its log, its batches and its step."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import mlperf_logging.compliance_checker
import pytest
import torch

from benchmarks.rnnt import example
from benchmarks.rnnt.data import synthetic_batch
from benchmarks.rnnt.model import PARTS
from benchmarks.rnnt.workload import SpeechRecognition
from common.data.batches import Batch, HostBatch
from common.data.order import sample_generator
from common.distributed.layout import Layout
from common.errors import ConfigError
from common.mlperf.admission import admit
from common.mlperf.parsed_log import read_log
from tests.benchmarks.recipes import recipes_of
from tests.capturable import Capturable
from tests.conftest import Finished, suite

RULESETS = ["1.0.0", "1.1.0", "2.0.0", "2.1.0", "3.0.0", "3.1.0"]
LOGGING = Path(mlperf_logging.compliance_checker.__file__).parents[1]


loaded, built = recipes_of("rnnt", SpeechRecognition)


# NVIDIA's submissions to MLPerf Training v3.1, and the last of v2.1: ranks, micro-batch, learning rate, epochs of
# warm-up and hold, decay, betas, decay of the averages, and training samples of an epoch in their logs.
PUBLISHED = {
    "8xH200": (8, 192, 0.0072, 5, 26, 0.92, 0.9, 0.999, 0.995, 278_016),
    "8xH100": (8, 192, 0.0072, 5, 26, 0.92, 0.9, 0.999, 0.995, 278_016),
    "64xH100": (64, 32, 0.007, 6, 33, 0.939, 0.9, 0.999, 0.995, 278_528),
    "512xH100": (512, 8, 0.013, 6, 33, 0.955, 0.833, 0.98, 0.995, 278_528),
    "1536xA100": (1536, 4, 0.014, 16, 40, 0.97, 0.82, 0.98, 0.96, 276_480),
}


@pytest.mark.parametrize("scale", list(PUBLISHED))
def test_a_recipe_has_the_published_hyperparameters_and_is_admitted(scale):
    ranks, utterances, rate, warmup, hold, decay, beta_1, beta_2, ema, samples = PUBLISHED[scale]
    run, session = loaded(f"scale={scale}", "ruleset=3.1.0")
    logged = admit(run, session).hyperparameters
    assert (run.training_ranks, run.micro_batch, run.train_samples) == (ranks, utterances, samples)
    assert (logged["global_batch_size"], logged["gradient_accumulation_steps"]) == (ranks * utterances, 1)
    assert (logged["opt_name"], logged["opt_base_learning_rate"]) == ("lamb", rate)
    assert (logged["opt_learning_rate_warmup_epochs"], logged["opt_lamb_learning_rate_hold_epochs"]) == (warmup, hold)
    assert logged["opt_lamb_learning_rate_decay_poly_power"] == decay
    assert (logged["opt_lamb_beta_1"], logged["opt_lamb_beta_2"]) == (beta_1, beta_2)
    assert (logged["model_eval_ema_factor"], logged["model_weights_initialization_scale"]) == (ema, 0.5)
    assert logged["opt_learning_rate_alt_warmup_func"] is logged["opt_learning_rate_alt_decay_func"] is True


@pytest.mark.parametrize(
    ("scale", "ruleset"),
    [*((scale, "3.1.0") for scale in ("1xGPU", "1xH200", "2xH200", "4xH200")), *(("8xH200", r) for r in RULESETS)],
)
def test_recipes_are_admitted_by_every_ruleset_with_rnnt(scale, ruleset):
    buckets = ["hparams.num_buckets=6"] if ruleset == "1.0.0" else []  # that ruleset alone fixes them
    run, session = loaded(f"scale={scale}", f"ruleset={ruleset}", *buckets)
    admission = admit(run, session)
    assert list(itertools.islice(admission.schedule.points(), 3)) == [1, 2, 3]
    assert {name: (target.value, target.direction) for name, target in run.benchmark.targets.items()} == {
        "word_error_rate": (0.058, "lower")
    }
    assert run.global_batch >= 1536
    assert run.declaration.initialised_tensors == PARTS


def test_every_reference_convergence_point_has_hyperparameters():
    points = json.loads((LOGGING / "rcp_checker" / "training_3.1.0" / "rcps_rnnt.json").read_text())
    batches = []
    for point in points.values():
        batch, wanted = point["BS"], point["Hyperparams"]
        micro_batch = math.gcd(batch, 192)
        run, session = loaded("scale=1xH200", f"hparams=rnnt/rcp_{batch}", f"micro_batch={micro_batch}")
        logged = admit(run, session).hyperparameters
        renamed = {"model_eva_ema_factor": "model_eval_ema_factor"}
        for name, value in wanted.items():
            if name != "opt_gradient_accumulation_steps":
                assert logged[renamed.get(name, name)] == value, f"{name} at {batch}"
        batches.append(batch)
    assert sorted(batches) == [512, 1024, 1536, 2048, 3072, 6144]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("hparams.epsilon=1e-6", "opt_lamb_epsilon"),
        ("hparams.weight_decay=1e-2", "opt_weight_decay"),
        ("hparams.clip_norm=2.0", "opt_gradient_clip_norm"),
        ("hparams.clip_norm=0", "positive; inf for none"),
        ("hparams.ema=1.0", "at least 0 and below 1"),
        ("benchmark.facts.learning_rate_min=1e-6", "opt_lamb_learning_rate_min"),
        ("benchmark.facts.speed_max=1.1", "data_speed_perturbaton_max"),
        ("benchmark.facts.time_masks=2", "data_spec_augment_time_n"),
        ("benchmark.facts.max_symbols=200", "eval_max_prediction_symbols"),
        ("benchmark.facts.max_frame_symbols=10", "the rules fix 30"),
        ("benchmark.facts.encoder_width=512", "the rules fix 1024"),
        ("benchmark.targets.word_error_rate.value=0.1", "the rules fix 0.058"),
        ("benchmark.eval_samples=100", "the rules fix 2703"),
        ("model.features=128", "a frame has 240, and can only be padded"),
        ("reader.buckets=[[641,125]]", "an even number"),
        ("hparams.global_batch_size=307200", "an epoch has 278528 utterances"),
    ],
)
def test_invalid_settings_are_refused_before_the_run(override, message):
    with pytest.raises(ConfigError, match=message):
        admit(*loaded("scale=8xH200", override))


@pytest.mark.parametrize("option", ["lstm", "joint", "transducer_loss", "audio"])
def test_an_unknown_implementation_is_an_error_with_the_option(option):
    with pytest.raises(ConfigError, match=rf"^model\.implementations\.{option}=nosuch: .* no implementation 'nosuch'"):
        built(f"model.implementations.{option}=nosuch")


def test_all_parameters_have_decay_and_trust_ratio():
    workload = built()
    (group,) = workload.parameter_groups()
    assert set(group.parameters) == {name for name, _ in workload.model.named_parameters()}
    assert (group.weight_decay, group.trust_ratio) == (1e-3, True)


def test_the_learning_rate_follows_the_rules_over_epochs():
    # 4 steps per epoch, 2 epochs of warm-up: the first update is step 1 of the rules' formula.
    workload = built("hparams.base_learning_rate=0.01", "hparams.warmup_epochs=2", "hparams.hold_epochs=1")
    step = workload.build_step()
    batches = list(itertools.islice(itertools.cycle(workload.example_batches()), 2))
    rates = []
    for _ in range(17):
        result = step(batches)
        rates.append(float(result.values[2 + result.names.index("learning_rate")]))
    decay = workload.own.hparams.decay_per_epoch
    expected = [0.01 * (number + 1) / 9 for number in range(1, 8)] + [0.01] * 5
    expected += [0.01 * decay] * 4 + [0.01 * decay**2]
    assert rates == pytest.approx(expected, rel=1e-6)


def test_evaluation_uses_averages_of_the_weights():
    workload = built("hparams.ema=0.75", "hparams.clip_norm=inf")
    step = workload.build_step()
    before = {name: tensor.clone() for name, tensor in workload.weights().tensors.items()}
    step(list(itertools.islice(itertools.cycle(workload.example_batches()), 2)))
    seen = workload.weights().tensors
    parameters = dict(workload.model.named_parameters())
    assert seen.keys() == parameters.keys()
    for name, start in before.items():
        torch.testing.assert_close(seen[name], 0.75 * start + 0.25 * parameters[name].detach(), msg=name)
    assert any(not torch.equal(start, parameters[name]) for name, start in before.items())


def test_there_is_an_example_of_every_bucket():
    workload = built()
    examples = list(workload.example_batches())
    assert sorted(batch.key for batch in examples) == list(workload.own.reader.buckets)
    assert examples[0].key == workload.own.reader.buckets[-1]  # real utterances are longer than all these buckets
    for batch in examples:
        frames, tokens = batch.key
        assert batch.tensors["features"].shape == (frames, 4, 240)
        assert batch.tensors["tokens"].shape == (4, tokens)
        assert workload.loss(batch).total.isfinite()


@pytest.mark.parametrize(("utterances", "first"), [(8, (592, 125)), (192, (642, 125))])
def test_the_first_example_is_a_typical_micro_batch(utterances, first):
    run, _ = loaded("scale=512xH100", f"micro_batch={utterances}", f"hparams.global_batch_size={512 * utterances}")
    lengths = example.real_lengths(utterances, run.workload.facts, sample_generator(0))
    key = example.own_key(lengths, run.workload.reader.buckets)
    assert key == first
    assert lengths.frames_B.max() <= key[0]
    assert lengths.tokens_B.max() <= key[1]


def test_examples_can_all_be_average_utterances():
    run, _ = loaded("scale=1xH200", "model.examples=average", "reader.buckets=[[410,56]]", "micro_batch=2")
    workload = SpeechRecognition(run, Layout(run.layout, seed=3))
    (batch,) = workload.example_batches()
    assert batch.tensors["feature_lengths"].tolist() == [409, 409]
    assert batch.tensors["token_lengths"].tolist() == [56, 56]
    assert batch.tensors["features"][:409, :, :240].float().std() == pytest.approx(1, rel=0.02)
    assert not batch.tensors["features"][:, :, 240:].any()
    assert workload.sample_flops() == pytest.approx(108e9, rel=0.01)


def test_prepared_batches_have_the_format_of_examples():
    workload = built()
    given = next(iter(workload.example_batches()))
    host = HostBatch(synthetic_batch(workload.own.facts, 4, given.key), workload.nominal_samples, 0, given.key)
    batch = workload.prepare(host)
    assert (batch.key, batch.samples) == (given.key, given.samples)
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in batch.tensors.items()} == {
        name: (tensor.shape, tensor.dtype) for name, tensor in given.tensors.items()
    }


def test_a_batch_above_the_graphs_capacity_uses_its_own_rows():
    workload = built("reader.rows={mean: 50, deviation: 0}")
    given = next(iter(workload.example_batches()))
    assert workload.loss(given).total.isinf(), "the case needs a capacity that is too small"
    larger = Batch(given.tensors, given.samples, (*given.key, 4 * 28 * 13))
    expected = built().loss(Batch(given.tensors, given.samples, given.key)).total
    torch.testing.assert_close(workload.loss(larger).total, expected)


def test_a_step_can_be_captured():
    workload = built()
    step, examples = workload.build_step(), list(workload.example_batches())
    with Capturable():
        step(examples)


def trained(data: Path, output: Path, *overrides: str) -> Finished:
    given = ["scale=test", "device=cpu", "seed=2", "benchmark.schedule.last_epoch=1", *overrides]
    return suite("train", "benchmark=rnnt", *given, f"data_dir={data}", f"output_dir={output}")


def test_an_epoch_has_whole_batches_and_the_log_their_samples(data_of, tmp_path):
    done = trained(data_of("rnnt"), tmp_path, "benchmark.train_samples=35")
    assert done.code in (0, 10), done.errors
    log = read_log(tmp_path / "mlperf.log")
    assert log.value("train_samples") == 32
    samples = [json.loads(line)["samples"] for line in (tmp_path / "metrics_rank0.jsonl").read_text().splitlines()]
    assert samples == [8, 16, 24, 32]
    initialised = [event.metadata["tensor"] for event in log.events if event.key == "weights_initialization"]
    assert initialised == list(PARTS)


def test_too_few_training_utterances_are_one_error(data_of, tmp_path):
    done = trained(data_of("rnnt"), tmp_path, "benchmark.train_samples=64")
    assert done.code not in (0, 10)
    assert "holds 36 training" in done.errors
    assert "Traceback" not in done.errors
