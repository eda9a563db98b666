"""Sizes of workloads against the models that they build."""

import pytest

from common.cli import load, workload_class
from common.config.composition import compose
from common.distributed.layout import Layout
from common.planning.compute import sizes_of
from common.planning.constants import UPDATE_BYTES

QUICK = ("resnet", "ssd300", "retinanet", "unet3d", "cosmoflow", "deepcam", "oc20", "rgat")
"""Networks that a CPU builds in about a second."""


def run_of(benchmark):
    return load(compose([f"benchmark={benchmark}", "scale=1xH200", "device=cpu"]))[0]


@pytest.mark.parametrize("benchmark", QUICK)
def test_the_parameters_are_those_of_the_built_model(benchmark):
    run = run_of(benchmark)
    groups = workload_class(benchmark)(run, Layout()).parameter_groups()
    built = sum(parameter.numel() for group in groups for parameter in group.parameters.values())
    assert sizes_of(run).parameters == built


def test_the_adapters_of_llama_2_are_trained():
    run = run_of("llama2_70b_lora")
    facts = run.workload.facts
    ends = 2 * facts.hidden + facts.qkv_features + facts.attention_features
    assert sizes_of(run).parameters == facts.layers * facts.lora_rank * ends


def test_the_parameters_of_a_decoder_follow_from_its_layers():
    assert sizes_of(run_of("llama31_8b")).parameters == 8_030_261_248  # as published
    gpt3 = load(compose(["benchmark=gpt3", "scale=512xH100"]))[0]
    assert sizes_of(gpt3).parameters == pytest.approx(175e9, rel=0.01)
    assert sizes_of(run_of("gpt3")).parameters < 10e9  # three layers


@pytest.mark.parametrize("benchmark", ["bert", "dlrm_dcnv2", "flux1", "stable_diffusion", "maskrcnn", "openfold"])
def test_every_update_rule_has_its_bytes(benchmark):
    run = run_of(benchmark)
    assert run.workload.hparams.optimizer in UPDATE_BYTES
    assert sizes_of(run).parameters > 0
