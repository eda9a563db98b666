"""Mistakes with BERT end in one message that names key, value and remedy; nothing half-written stays behind."""

from __future__ import annotations

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from benchmarks.bert.workload import BertPretraining
from common import cli
from common.config.composition import compose
from common.config.schema import RunConfig
from common.distributed.layout import Layout
from common.errors import CheckpointError, ConfigError, SuiteError, UnsupportedImplementation
from common.mlperf.admission import admit

CONFIGURATION, DATA, CHECKPOINT = 2, 3, 4  # exit codes


def composed(*overrides: str) -> RunConfig:
    """The configuration of BERT's ``test`` recipe, as far as it is checked before any rank starts."""
    run, session = cli.load(compose(["benchmark=bert", "scale=test", "device=cpu", *overrides]))
    admit(run, session)
    return run


def built(*overrides: str) -> BertPretraining:
    """The workload of that configuration."""
    cfg = composed(*overrides)
    return BertPretraining(cfg, Layout(cfg.layout))


REFUSED = {
    "hparams.base_learning_rate=nan": "hparams.base_learning_rate=nan: positive and finite",
    "hparams.base_learning_rate=-1": "hparams.base_learning_rate=-1.0: positive and finite",
    "hparams.start_warmup_step=5": "hparams.start_warmup_step=5: 0 or below",
    "hparams.epsilon=1e-60": "hparams.epsilon=1e-60: finite and at least 1.2e-38",  # float32's smallest normal number
    "hparams.global_batch_size=-16": "hparams.global_batch_size=-16: a batch has at least one sample",
    "micro_batch=1": "micro_batch=1: 2 samples are computed together, in a row or by ranks of tp: use a multiple of 2",
    "benchmark.facts.heads=0": "benchmark.facts.heads=0: at least 1",
    "benchmark.facts.heads=3": "benchmark.facts.hidden=32: a positive multiple of heads=3",
    "benchmark.facts.vocabulary=32769": "benchmark.facts.vocabulary=32769: .* up to 32767",  # 16 bits with a sign
    "benchmark.facts.max_sequence_length=32768": "benchmark.facts.max_sequence_length=32768: .* up to 32767",
    "reader.format=unpacked": "reader.order=balanced: .* reader.order=shuffled",
    "benchmark.schedule.interval=abc": "benchmark.schedule.interval=abc: expected int",
    "benchmark.schedule.interval=15": "hparams.global_batch_size=16: evaluations are 15 samples apart",
    "+benchmark.schedule.last_epoch=3": "benchmark.schedule has no option 'last_epoch'; .* interval",
    "optimizer.bucket_mb=1e-9": "optimizer.bucket_mb=1e-09: a bucket has a positive, finite size",
    "bench.warmup_steps=-1": "bench.warmup_steps=-1: 0 or more steps",
    "bench.pause_ms=-1": "bench.pause_ms=-1.0: 0 or more milliseconds",
    "bench.only=everything": "bench.only=everything: expected one of step, reader",
    "bench.profile_steps=0": "bench.profile_steps=0: at least 1 step is profiled",
    "optimizer.bucket_mb=inf": "optimizer.bucket_mb=inf: a bucket has a positive, finite size",
    "model.implementations.attention=foo": "model.implementations.attention=foo: .* auto, triton, te, reference",
    "model.attention=te": "model.attention: .* did you mean model.implementations.attention",
    "+model.implementations.softmax=auto": "model.implementations.softmax: unknown operation; there are attention, ",
}


@pytest.mark.parametrize("override", REFUSED)
def test_a_value_out_of_its_range_is_refused_before_a_rank_starts(override):
    with pytest.raises(ConfigError, match=f"^{REFUSED[override]}"):
        composed(override)


@pytest.mark.parametrize(
    ("choice", "reason"),
    [
        ("attention=triton", "not 16"),
        ("dropout=triton", "needs a GPU"),
        ("linear=fp8", "not of torch.float32"),
        ("linear=te", "needs a CUDA device"),
        ("attention=te", "needs a CUDA device"),
    ],
)
def test_an_implementation_that_cannot_run_here_is_named(choice, reason):
    with pytest.raises(UnsupportedImplementation, match=rf"^model\.implementations\.{choice}: .* {reason}"):
        built(f"model.implementations.{choice}")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["layout.tp=2", "scale.gpus_per_node=2"], "layout.tp=2: BERT's ranks are data-parallel, use 1"),
        (["reader.eval_rows=61"], "reader.eval_rows=61: .* benchmark.eval_samples=60"),
    ],
)
def test_impossible_network_options_are_named(overrides, message):
    with pytest.raises(ConfigError, match=f"^{message}"):
        built(*overrides)


@pytest.mark.parametrize("kind", ["missing", "another shape"])
def test_a_starting_checkpoint_that_does_not_fit_is_named_with_its_keys(tmp_path, kind):
    path = tmp_path / "start.pt"
    if kind != "missing":
        torch.save({"bert.embeddings.word_embeddings.weight": torch.zeros(1024, 64)}, path)
    reason = {
        "missing": "there is no such file",
        "another shape": r"has shape \[1024, 64\], and the model needs \[1024, 32\]",
    }[kind]
    named = rf"model\.initial_checkpoint=start\.pt in assets_dir={tmp_path}; 'mlperf-suite download benchmark=bert'"
    with pytest.raises(CheckpointError, match=f"^{path}: .*{reason}.*{named}") as error:
        built(f"assets_dir={tmp_path}", "model.initial_checkpoint=start.pt")
    assert error.value.exit_code == CHECKPOINT


def test_an_unknown_set_of_hyperparameters_is_named_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"^hparams=bert/nosuch: unknown; bert has bert/documentation, .*rcp_448"):
        composed("hparams=bert/nosuch")


def test_a_scale_without_a_recipe_is_named_with_the_recipes():
    # Another workload has a recipe for 3,584 GPUs.
    with pytest.raises(ConfigError, match=r"^scale=3584xH100: unknown; bert has .*; did you mean 8xH100\?$"):
        compose(["benchmark=bert", "scale=3584xH100"])


@pytest.mark.parametrize(
    ("arguments", "message", "code"),
    [
        (
            ["generate", "scale=nosuch"],
            "scale=nosuch: unknown; bert has 1xGPU, 1xH200, ",
            CONFIGURATION,
        ),
        (["generate", "scale=8xH200"], "scale=8xH200 of bert is not for synthetic data", CONFIGURATION),
        (["generate", "scale=test", "--raw-dir", "/dev/null/x"], "cannot write to /dev/null/x.*Not a directory", DATA),
        (["prepare", "--workers", "0"], "--workers=0: at least 1", CONFIGURATION),
        (["prepare", "--raw-dir", "EMPTY", "--data-dir", "EMPTY/data"], "vocab.txt is missing; .* download", DATA),
    ],
)
def test_the_error_of_a_data_command_names_its_cause(tmp_path, arguments, message, code):
    command, *rest = [argument.replace("EMPTY", str(tmp_path)) for argument in arguments]
    with pytest.raises(SuiteError, match=message) as error:
        cli.COMMANDS[command](["benchmark=bert", *rest])
    assert error.value.exit_code == code
    assert not list(tmp_path.iterdir())


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """As on a full disk no file can grow beyond ``size`` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)


def test_a_full_disk_leaves_no_half_generated_text(tmp_path):
    raw = tmp_path / "raw"
    generate = ["benchmark=bert", "scale=test", "--raw-dir", str(raw)]
    with files_of_at_most(4096), pytest.raises(SuiteError, match=r"^generate: .*; free some space and run"):
        cli.COMMANDS["generate"](generate)
    assert not raw.exists()
    assert cli.COMMANDS["generate"](generate) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["raw"]
