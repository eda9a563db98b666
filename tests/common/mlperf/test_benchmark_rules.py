"""The rules against the tables of the rules' text and against the installed checker's rule files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from mlperf_logging import benchmark_meta
from mlperf_logging.compliance_checker import mlp_compliance

from common.errors import ConfigError
from common.mlperf.compliance import rule_records
from common.mlperf.rules import (
    BENCHMARKS,
    RULESETS,
    Rules,
    accepted,
    newest_ruleset,
    round_names,
    rules_for,
    version_key,
)

CHECKER = Path(mlp_compliance.__file__).parent
VERSIONS = [(usage, version) for usage, versions in RULESETS.items() for version in versions]
ALL_RULES = [rules_for(name, version) for name in BENCHMARKS for version in rules_for(name).accepted_by]


def rules_id(rules: Rules) -> str:
    return f"{rules.benchmark}-{rules.ruleset}"


# Rules, table of quality targets: benchmark in a ruleset to target(s) and direction.
TARGETS = {
    ("resnet", "4.0.0"): [("at_least", 0.759)],
    ("ssd300", "1.1.0"): [("at_least", 0.23)],
    ("ssd", "2.0.0"): [("at_least", 0.34)],
    ("retinanet", "5.1.0"): [("at_least", 0.34)],
    ("maskrcnn", "3.1.0"): [("at_least", 0.377), ("at_least", 0.339)],
    ("unet3d", "4.0.0"): [("at_least", 0.908)],
    ("bert", "0.7.0"): [("at_least", 0.712)],
    ("bert", "5.0.0"): [("at_least", 0.72)],
    ("rnnt", "3.1.0"): [("at_most", 0.058)],
    ("dlrm", "2.1.0"): [("at_least", 0.8025)],
    ("dlrm_dcnv2", "6.0.0"): [("at_least", 0.80275)],
    ("gpt3", "4.1.0"): [("at_most", 2.69)],
    ("stable_diffusion", "5.0.0"): [("at_most", 90), ("at_least", 0.15)],
    ("llama2_70b_lora", "6.1.0"): [("at_most", 0.925)],
    ("gnn", "4.1.0"): [("at_least", 0.72)],
    ("rgat", "5.1.0"): [("at_least", 0.72)],
    ("llama31_405b", "6.0.0"): [("at_most", 5.6)],
    ("llama31_8b", "6.1.0"): [("at_most", 3.3)],
    ("flux1", "6.1.0"): [("at_most", 0.586)],
    ("gpt_oss_20b", "6.1.0"): [("at_most", 3.34)],
    ("deepseekv3_671b", "6.1.0"): [("at_most", 3.6)],
    ("minigo", "2.1.0"): [("at_least", 0.5)],
    ("gnmt", "0.7.0"): [("at_least", 0.24)],
    ("transformer", "0.7.0"): [("at_least", 0.25)],
    ("cosmoflow", "3.0.0"): [("at_most", 0.124)],
    ("deepcam", "3.0.0"): [("at_least", 0.82)],
    ("oc20", "3.0.0"): [("at_most", 0.036)],
    ("openfold", "3.0.0"): [("at_least", 0.8)],
}

RUNS_OF_HPC = {"cosmoflow": 10, "deepcam": 5, "oc20": 5, "openfold": 10}  # HPC rules, section on results


@pytest.mark.parametrize(("name", "ruleset"), TARGETS)
def test_targets_are_those_of_the_rules(name, ruleset):
    targets = rules_for(name, ruleset).targets
    assert [(target.direction, target.value) for target in targets] == TARGETS[name, ruleset]


def test_bert_of_v07_has_another_target_for_large_batches():
    rules = rules_for("bert", "0.7.0")
    assert rules.meets_target({"eval_accuracy": 0.707}, 8192)
    assert not rules.meets_target({"eval_accuracy": 0.707}, 8191)
    assert not rules_for("bert", "1.0.0").meets_target({"eval_accuracy": 0.715}, 8192)


def test_runs_of_hpc_are_those_of_the_rules():
    assert {rules.benchmark: rules.runs for rules in ALL_RULES if rules.usage == "hpc"} == RUNS_OF_HPC


def test_olympic_scoring_drops_four_of_unet3d_and_one_of_the_others():
    for name in BENCHMARKS:
        rules = rules_for(name)
        assert (rules.dropped, rules.non_converged) == ((4, 4) if name == "unet3d" else (1, 1)), name


@pytest.mark.parametrize(("name", "last", "retired"), [("unet3d", "v4.0", True), ("llama2_70b_lora", "v6.1", False)])
def test_last_round(name, last, retired):
    rules = rules_for(name)
    assert (rules.last_round, rules.retired) == (last, retired)


@pytest.mark.parametrize(
    ("log_name", "ruleset", "benchmark"),
    [
        ("ssd", "0.7.0", "ssd300"),
        ("ssd", "1.1.0", "ssd300"),
        ("ssd", "2.0.0", "retinanet"),
        ("ssd", "4.1.0", "retinanet"),
        ("retinanet", "5.0.0", "retinanet"),
        ("gnn", "4.0.0", "rgat"),
        ("rgat", "5.1.0", "rgat"),
    ],
)
def test_names_that_changed(log_name, ruleset, benchmark):
    rules = rules_for(log_name, ruleset)
    assert (rules.benchmark, rules.log_name) == (benchmark, log_name)
    assert accepted(log_name, ruleset)


@pytest.mark.parametrize(
    ("name", "newest"),
    [("ssd", "4.1.0"), ("ssd300", "1.1.0"), ("retinanet", "5.1.0"), ("gnn", "4.1.0"), ("rgat", "5.1.0")],
)
def test_newest_ruleset_of_a_name_that_changed(name, newest):
    assert newest_ruleset(name) == newest


@pytest.mark.parametrize(
    ("name", "ruleset", "unit", "key"),
    [
        ("resnet", "4.0.0", "epoch", "epoch_num"),
        ("unet3d", "3.0.0", "epoch", "epoch_num"),
        ("unet3d", "3.1.0", "samples", "epoch_num"),
        ("unet3d", "4.0.0", "samples", "epoch_num"),
        ("bert", "5.0.0", "samples", "epoch_num"),
        ("gpt3", "4.1.0", "tokens", "epoch_num"),
        ("stable_diffusion", "3.1.0", "steps", "step_num"),
        ("stable_diffusion", "5.0.0", "samples", "samples_count"),
        ("llama2_70b_lora", "6.1.0", "samples", "samples_count"),
        ("rgat", "5.1.0", "epoch fraction", "epoch_num"),
        ("openfold", "3.0.0", "samples", "epoch_num"),
    ],
)
def test_unit_and_key_of_progress(name, ruleset, unit, key):
    rules = rules_for(name, ruleset)
    assert (rules.unit, rules.progress_key) == (unit, key)


def test_initialisation_caps():
    assert rules_for("resnet", "0.7.0").init_minutes == 20
    assert rules_for("resnet", "4.0.0").init_minutes == 30
    assert rules_for("gpt3").init_minutes == 60


@pytest.mark.parametrize(("name", "ruleset"), [("resnet", "4.1.0"), ("bert", "5.1.0"), ("gnn", "5.0.0"), ("ssd", "9")])
def test_ruleset_that_does_not_accept_a_benchmark_is_an_error(name, ruleset):
    with pytest.raises(ConfigError, match=r"(does not accept|is not known; \w+ is accepted by)"):
        rules_for(name, ruleset)
    assert not accepted(name, ruleset)


def test_unknown_benchmark_is_an_error():
    with pytest.raises(ConfigError, match="not known"):
        newest_ruleset("alexnet")


def test_every_ruleset_of_the_installed_checker_is_known():
    """Fails when a new mlperf-logging ships a ruleset: the tables of rules.py need its benchmarks and targets."""
    folders = {
        folder.name for folder in CHECKER.iterdir() if re.fullmatch(r"(training|hpc)_\d+\.\d+\.\d+", folder.name)
    }
    before_divisions = {"training_0.6.0"}  # has no closed and open rule files; v0.6 is not supported
    assert folders - before_divisions == {f"{usage}_{version}" for usage, version in VERSIONS}


@pytest.mark.parametrize(("usage", "version"), VERSIONS)
def test_acceptance_is_the_checkers(usage, version):
    record = rule_records(f"{usage}_{version}/closed_common.yaml")["submission_benchmark"]
    listed = re.findall(r"'(\w+)'", record["CHECK"].partition(" in ")[2])
    judged = {name for name in listed if (CHECKER / f"{usage}_{version}" / f"closed_{name}.yaml").exists()}
    ours = {rules.log_name for rules in ALL_RULES if (rules.usage, rules.ruleset) == (usage, version)}
    assert ours == judged


@pytest.mark.parametrize("rules", [r for r in ALL_RULES if r.usage == "training"], ids=rules_id)
def test_runs_are_those_of_the_package_checker(rules):
    assert benchmark_meta.get_result_file_counts("training")[rules.log_name] == rules.runs


@pytest.mark.parametrize("rules", ALL_RULES, ids=rules_id)
def test_targets_are_those_of_the_checkers_rule_files(rules):
    """Our judgement and the checker's expression agree on, beside and far from every number in the expression."""
    records = rule_records(f"{rules.usage}_{rules.ruleset}/closed_{rules.log_name}.yaml")
    name = "aggregated_eval_accuracy" if rules.benchmark == "stable_diffusion" else rules.quality_key
    expression = records[name]["ATLEAST_ONE_CHECK"].strip()
    state = {"target_accuracy": {"dlrmv4": 0.75, "qwen35_397b_grpo": 0.69}.get(rules.benchmark)}  # set in BEGIN
    numbers = {float(text) for text in re.findall(r"\d+\.?\d*", expression)} | {0.69, 0.75}
    tried = sorted(n + delta for n in numbers for delta in (-0.01, -1e-6, 0.0, 1e-6, 0.01) if n + delta < 100)
    metrics = [target.metric for target in rules.targets]
    for batch in (4096, 8191, 8192):
        state["global_batch_size"] = batch
        for first in tried:
            for second in tried if len(metrics) > 1 else (0.0,):
                values = dict(zip(metrics, (first, second), strict=False))
                logged = {"value": values if len(metrics) > 1 else first}
                theirs = bool(eval(expression, {"v": logged, "s": state}))
                if rules.benchmark in ("dlrmv4", "qwen35_397b_grpo") and not 0 <= first < 1:
                    continue  # these files bound the value in another rule
                assert rules.meets_target(values, batch) == theirs, (values, expression)


def test_progress_keys_are_those_that_the_rule_files_demand():
    demanded = {}
    for rules in ALL_RULES:
        records = rule_records(f"{rules.usage}_{rules.ruleset}/closed_{rules.log_name}.yaml")
        record = records.get("aggregated_eval_accuracy") or records[rules.quality_key]
        keys = re.findall(r"'(epoch_num|samples_count|step_num)' in", str(record["CHECK"]))
        demanded[rules_id(rules)] = keys
    assert {rules_id(rules): [rules.progress_key] for rules in ALL_RULES} == demanded


def test_versions_are_ordered_by_number():
    assert sorted(["10.0.0", "2.1.0", "2.0.0"], key=version_key) == ["2.0.0", "2.1.0", "10.0.0"]
    assert round_names(["10.0.0", "2.1.0", "2.1.1"]) == ["v2.1", "v10.0"]
