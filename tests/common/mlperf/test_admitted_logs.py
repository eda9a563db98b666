"""What admission lets run in a ruleset is not refused at the end: every workload, ruleset and division."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from benchmarks import WORKLOADS
from common import cli
from common.config.composition import compose
from common.config.schema import RunConfig, SessionConfig
from common.errors import ConfigError
from common.mlperf.admission import Admission, admit
from common.mlperf.mllog import RunLog
from common.mlperf.rules import Rules, newest_ruleset, rules_for
from common.mlperf.verdict import judge
from common.run.timed_run import TimedRun

RECIPES = {"dlrm": "8xA100", "gpt3": "64xH100", "llama31_8b": "8xH200", "minigo": "8xH100"}
"""Recipes for real data, where it is not that of 8 H200."""

SECOND_MS = 1000

OVERRIDES = {"bert": ["hparams.training_steps=5000"]}
"""In v0.7 BERT is evaluated first after 3,000,000 samples; the recipe ends before."""

REFUSED = {
    ("gpt3", "3.0.0", "open"): "the next ruleset without this rule is 4.0.0: ruleset=4.0.0",  # it has no open_gpt3.yaml
    ("gpt3", "3.1.0", "open"): "the next ruleset without this rule is 4.0.0: ruleset=4.0.0",
    # These files of the open division do not list the benchmark.
    ("llama2_70b_lora", "4.0.0", "open"): "the next ruleset without this rule is 5.0.0: ruleset=5.0.0",
    ("llama2_70b_lora", "4.1.0", "open"): "the next ruleset without this rule is 5.0.0: ruleset=5.0.0",
    # This file lists the names of TensorFlow's tensors.
    ("minigo", "1.1.0", "closed"): "the next ruleset without this rule is 2.0.0: ruleset=2.0.0",
    ("rnnt", "1.0.0", "closed"): r"data_train_num_buckets = 1 breaks rule `v\['value'\] == 6`",
}
"""Workload, ruleset and division that admission refuses for a recipe of real data, and what it says."""

UNREACHABLE = {("llama31_8b", ruleset, "open") for ruleset in ("5.1.0", "6.0.0", "6.1.0")}
"""Where the checker's rule file wants a quality that no run has: a log perplexity below 1 for Llama 3.1 8B. The run is
possible, since the closed division is, but no log of it passes MLCommons' checker."""


def pairs() -> Iterator[Any]:
    """Every workload with every ruleset and division; slow where the newest ruleset already covers the kind."""
    for name in sorted(WORKLOADS):
        newest = newest_ruleset(name)
        for ruleset in rules_for(name, newest).accepted_by:
            for division in ("closed", "open"):
                case = (name, ruleset, division)
                marks = () if ruleset == newest or case in REFUSED or case in UNREACHABLE else pytest.mark.slow
                yield pytest.param(*case, id="-".join(case), marks=marks)


@cache
def composed(name: str) -> tuple[RunConfig, SessionConfig]:
    """The configuration of a recipe for real data. Admission looks at no file."""
    return cli.load(
        compose(
            [f"benchmark={name}", f"scale={RECIPES.get(name, '8xH200')}", "assets_dir=assets", *OVERRIDES.get(name, [])]
        )
    )


def qualities(rules: Rules, run: RunConfig) -> tuple[dict[str, float], dict[str, float]]:
    """Metric to a value that misses the rules' target, and to one between the target and the checker's other bound."""
    poor, good = {}, {}
    for metric, target in zip(run.benchmark.targets, rules.targets_at(run.global_batch), strict=True):
        bound = 1.0 if target.bound is None else target.bound
        poor[metric] = target.value - (bound - target.value) / 2
        good[metric] = target.value + (bound - target.value) / 2
    return poor, good


def write_log(path: Path, run: RunConfig, session: SessionConfig, admission: Admission) -> None:
    """The log of a run that meets the target at its second evaluation."""
    rules, schedule = admission.rules, admission.schedule
    with RunLog(path, 0) as log:
        clock = TimedRun(log, rules, schedule, run.train_samples, run.global_batch, run.declaration.sample_tokens)
        events = clock.events
        events.begin(run, session, rules, None, time.time_ns() // 1_000_000, gpus=True)
        events.settings(7, admission.hyperparameters, {}, run.declaration.initialised_tensors)
        events.initialised()
        clock.start(0)
        now = clock.start_ms
        events.data_opened(run.train_samples, run.benchmark.eval_samples)
        blocks = schedule.blocks(run.train_samples, run.global_batch)
        for block, values in zip(itertools.islice(blocks, 2), qualities(rules, run), strict=True):
            done = block.start_sample + block.samples
            point = clock.evaluation_point(block, done)
            events.block_start(block, block.start_sample, now)
            now += 600 * SECOND_MS
            events.block_stop(block, done, 100.0, now)
            if schedule.unit == "generation":
                events.self_play_games([run.workload.facts.games], point)
            events.eval_start(point, now)
            now += SECOND_MS
            events.accuracy(values, point, now)
            events.eval_stop(point, now)
        events.run_stop("success", point, now)


@pytest.mark.parametrize(("name", "ruleset", "division"), pairs())
def test_the_log_of_an_admitted_run_is_not_refused(name, ruleset, division, tmp_path):
    run, session = composed(name)
    session = replace(session, ruleset=ruleset, submission=replace(session.submission, division=division))
    refused = REFUSED.get((name, ruleset, division))
    if refused is not None:
        with pytest.raises(ConfigError, match=refused):
            admit(run, session)
        return
    path = tmp_path / "result_0.txt"
    write_log(path, run, session, admit(run, session))
    verdict = judge(path, ruleset)
    if (name, ruleset, division) in UNREACHABLE:
        assert [reason for reason in verdict.reasons if "`v['value'] < 1.0`" not in reason] == []
    else:
        assert verdict.kind != "refused", "\n".join(verdict.reasons)
