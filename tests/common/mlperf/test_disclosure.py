"""Precision, parallelism and configuration in the log, which rulesets from 6.0.0 on know."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from common import cli
from common.config.composition import compose
from common.config.schema import (
    BenchmarkConfig,
    Declaration,
    OptimizerConfig,
    RunConfig,
    ScaleConfig,
    SessionConfig,
    SubmissionConfig,
    TargetConfig,
)
from common.data.batches import Block
from common.mlperf.admission import admit, disclosures
from common.mlperf.events import RunEvents
from common.mlperf.mllog import RunLog
from common.mlperf.rules import RULESETS, rules_for
from common.mlperf.verdict import judge
from tests import toy
from tests.command_line import official_exit_code
from tests.conftest import ROOT

NAME = "llama2_70b_lora"
HPARAMS = {
    "opt_base_learning_rate": 4e-4,
    "opt_learning_rate_training_steps": 1024,
    "opt_gradient_clip_norm": 0.3,
    "opt_adamw_weight_decay": 1e-4,
    "lora_alpha": 32,
    "lora_rank": 16,
}
EXPECTED = {
    "lowest_numerical_precision_in_linear": "fp8",
    "lowest_numerical_precision_in_attn": "bfloat16",
    "lowest_numerical_precision_in_comm": "bfloat16",
    "tensor_parallelism": 4,
    "pipeline_parallelism": 1,
    "context_parallelism": 2,
    "expert_parallelism": 1,
    "micro_batch_size": 1,
    "config_filename": "configs/recipe/llama2_70b_lora.yaml:64xH100",
}
"""Entries for NVIDIA's layout of 64 GPUs with tensor parallelism 4, context parallelism 2 and FP8 products."""


def run_of(**changes: Any) -> RunConfig:
    """The configuration of a fine-tuning on 64 GPUs."""
    keys = {"global_batch_size": "global_batch", "gradient_accumulation_steps": "grad_accumulation_steps"}
    run = RunConfig(
        benchmark=BenchmarkConfig(
            NAME, "", {"evaluation_loss": TargetConfig(0.925, "lower")}, 3901, 173, "synthetic", {}, {},
            {"always": keys | {key: f"hparams.{key}" for key in HPARAMS}},
        ),
        scale=ScaleConfig(8, 8), system=cast(Any, SimpleNamespace()), layout={"pp": 1, "dp": 8, "cp": 2, "tp": 4},
        micro_batch=1, global_batch=8, grad_accumulation_steps=1, precision="bf16", optimizer=OptimizerConfig(),
        deterministic=False, assets_dir=None, workload=SimpleNamespace(hparams=SimpleNamespace(**HPARAMS)),
        recipe="llama2_70b_lora/64xH100",
        declaration=Declaration(lowest_precision={"linear": "fp8"}),
    )  # fmt: skip
    return replace(run, **changes)


def session_of(ruleset: str) -> SessionConfig:
    submission, bench = SubmissionConfig("acme", "h100x64"), SimpleNamespace(traffic=True)
    settings = {"submission": submission, "cache_cleared": True, "bench": bench, "staging_dir": None}
    return cast(SessionConfig, SimpleNamespace(ruleset=ruleset, **settings))


def write_log(path: Path, ruleset: str) -> Path:
    """The log of a run whose first evaluation reaches the target."""
    run, session = run_of(), session_of(ruleset)
    admission, began = admit(run, session), time.time_ns() // 1_000_000
    with RunLog(path, 0) as log:
        events = RunEvents(log, admission.rules.progress_key)
        events.begin(run, session, admission.rules, None, began, gpus=True)
        events.settings(7, admission.hyperparameters, {}, ())
        events.initialised()
        events.run_start()
        events.data_opened(3901, 173)
        block = Block(0, 1, 0, 0, 1536)
        events.block_start(block, 0)
        events.block_stop(block, 1536, 14.0)
        events.eval_start(1536)
        events.accuracy({"evaluation_loss": 0.92}, 1536, time.time_ns() // 1_000_000)
        events.eval_stop(1536)
        events.run_stop("success", 1536, None)
    return path


@pytest.mark.parametrize("ruleset", ["6.1.0", "6.0.0"])
def test_only_ruleset_6_1_of_the_official_checker_requires_the_keys(ruleset, tmp_path):
    path = write_log(tmp_path / "whole.log", ruleset)
    assert official_exit_code(path, ruleset) == 0
    bare = tmp_path / "bare.log"
    lines = path.read_text().splitlines(keepends=True)
    bare.write_text("".join(line for line in lines if not any(f'"{key}"' in line for key in EXPECTED)))
    assert len(lines) - len(bare.read_text().splitlines()) == len(EXPECTED)
    assert (official_exit_code(bare, ruleset) != 0) == (ruleset == "6.1.0")


@pytest.mark.parametrize("key", EXPECTED)
def test_a_log_without_a_key_is_refused(key, tmp_path):
    path = write_log(tmp_path / "whole.log", "6.1.0")
    lines = path.read_text().splitlines(keepends=True)
    short = tmp_path / "short.log"
    short.write_text("".join(line for line in lines if f'"{key}"' not in line))
    verdict = judge(short)
    assert verdict.kind == "refused"
    assert any(key in reason for reason in verdict.reasons), verdict.reasons


@pytest.mark.parametrize("ruleset", RULESETS["training"])
def test_a_log_has_only_keys_of_its_ruleset(ruleset):
    benchmark = NAME if ruleset >= "4.0.0" else "bert"
    found = disclosures(run_of(), rules_for(benchmark, ruleset))
    assert found == (EXPECTED if ruleset >= "6.0.0" else {})


@pytest.mark.parametrize(
    ("precision", "word"), [("fp64", "fp64"), ("fp32", "fp32"), ("bf16", "bfloat16"), ("fp16",) * 2]
)
def test_the_default_of_the_lowest_precision_is_that_of_the_weights(precision, word):
    run = run_of(precision=precision, layout={}, declaration=Declaration())
    found = disclosures(run, rules_for(NAME, "6.1.0"))
    assert {found[f"lowest_numerical_precision_in_{role}"] for role in ("linear", "attn", "comm")} == {word}
    assert {found[f"{axis}_parallelism"] for axis in ("tensor", "pipeline", "context", "expert")} == {1}


def test_the_configuration_is_named_by_its_recipe():
    run, _ = cli.load(compose(["benchmark=bert", "scale=8xH200", "assets_dir=assets"]))
    file, _, scale = run.config_file.partition(":")
    assert (ROOT / file).is_file()
    assert scale == "8xH200"
    with toy.known():
        run, _ = cli.load(compose([f"benchmark={toy.NAME}", "scale=test"]))
    assert run.config_file == f"configs/recipe/{toy.NAME}.yaml:test"
