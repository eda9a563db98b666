"""The checkpoint from which OpenFold's rules start: names, shapes, the state of Adam, and what is refused."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.openfold.checkpoint import own_name, read_checkpoint
from benchmarks.openfold.config import Facts
from benchmarks.openfold.model import AlphaFold
from benchmarks.openfold.workload import OpenFold
from common.config import loading
from common.config.composition import compose
from common.distributed.layout import Layout
from common.errors import CheckpointError
from common.mlperf.fixed import fixed_facts
from tests.benchmarks.openfold.small_folds import SPLIT, batch, chooser, network

STEPS = 75


CORE = (
    "msa_transition", "outer_product_mean", "tri_mul_out", "tri_mul_in", "tri_att_start", "tri_att_end",
    "pair_transition",
)  # fmt: skip
"""Parts of a block that the published names have in a module ``core``."""


def published_name(name: str) -> str:
    """Return the name that the reference implementation has for a parameter of ours."""
    parts = name.split(".")
    if parts[0] in ("evoformer_stack", "extra_msa_stack") and len(parts) > 3 and parts[3] in CORE:
        parts.insert(3, "core")
    return ".".join(parts).replace("structure_module.transition.layers.0.", "structure_module.transition.")


def published(change: Callable[[dict[str, Any]], None] = lambda _: None) -> dict[str, Any]:
    """A file's content: a small network after an update by PyTorch's Adam."""
    model = network(torch.float32)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3, eps=1e-6)
    model(batch(1)).distogram.square().sum().backward()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter) if parameter.grad is None else parameter.grad
    optimizer.step()
    state = optimizer.state_dict()
    for entry in state["state"].values():
        entry["step"] = torch.tensor(float(STEPS))
    weights = {published_name(name): tensor for name, tensor in model.state_dict().items()}
    content = {"alphafold_state_dict": weights, "optimizer_state_dict": state}
    change(content)
    return content


def written(path: Path, content: object) -> str:
    """Write a file and return its digest."""
    torch.save(content, path)
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_weights_and_moments_come_by_the_order_of_the_names(tmp_path: Path) -> None:
    content = published()
    digest = written(tmp_path / "start.pt", content)
    start = read_checkpoint(tmp_path / "start.pt", digest, network())
    assert start.steps == STEPS
    for number, (name, (_, weight)) in enumerate(
        zip(network().state_dict(), content["alphafold_state_dict"].items(), strict=True)
    ):
        state = content["optimizer_state_dict"]["state"][number]
        expected = (weight, state["exp_avg"], state["exp_avg_sq"])
        assert all(map(torch.equal, start.tensors[name], expected)), name


@pytest.mark.parametrize(
    ("name", "own"),
    [
        (
            "evoformer_stack.blocks.47.core.msa_transition.linear_1.weight",
            "evoformer_stack.blocks.47.msa_transition.linear_1.weight",
        ),
        (
            "extra_msa_stack.blocks.3.core.tri_mul_out.linear_a_p.bias",
            "extra_msa_stack.blocks.3.tri_mul_out.linear_a_p.bias",
        ),
        ("extra_msa_stack.blocks.0.msa_att_col.global_attention.linear_q.weight",) * 2,
        ("evoformer_stack.blocks.0.msa_att_row.mha.linear_g.bias",) * 2,
        ("template_pair_stack.blocks.1.tri_att_end.mha.linear_o.weight",) * 2,
        ("structure_module.transition.linear_3.bias", "structure_module.transition.layers.0.linear_3.bias"),
        ("structure_module.transition.layer_norm.weight",) * 2,
        ("auxiliary_heads.plddt.linear_2.weight",) * 2,
    ],
)
def test_a_published_name_is_that_of_a_parameter(name: str, own: str) -> None:
    with torch.device("meta"):
        model = AlphaFold(fixed_facts(Facts, "openfold"), chooser(), SPLIT)
    assert own_name(name) == own
    assert own in model.state_dict()


def renamed(content: dict[str, Any]) -> None:
    weights = content["alphafold_state_dict"]
    content["alphafold_state_dict"] = {name.replace("ipa", "attention"): tensor for name, tensor in weights.items()}


def reshaped(content: dict[str, Any]) -> None:
    content["alphafold_state_dict"]["extra_msa_embedder.linear.bias"] = torch.zeros(3)


def without_adam(content: dict[str, Any]) -> None:
    del content["optimizer_state_dict"]


def of_several_steps(content: dict[str, Any]) -> None:
    content["optimizer_state_dict"]["state"][3]["step"] = torch.tensor(2.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (renamed, "the first difference is structure_module.attention"),
        (reshaped, r"extra_msa_embedder.linear.bias is not fp32 of the shape \(6,\)"),
        (without_adam, "not a checkpoint of OpenFold with the state of Adam"),
        (of_several_steps, "different numbers of updates, 2 to 75"),
    ],
)
def test_another_checkpoint_is_refused(tmp_path: Path, change: Any, message: str) -> None:
    digest = written(tmp_path / "start.pt", published(change))
    with pytest.raises(CheckpointError, match=message):
        read_checkpoint(tmp_path / "start.pt", digest, network())


def test_another_digest_is_refused_and_a_missing_file_named(tmp_path: Path) -> None:
    digest = written(tmp_path / "start.pt", published())
    with pytest.raises(CheckpointError, match=f"its SHA256 is {digest}"):
        read_checkpoint(tmp_path / "start.pt", "0" * 64, network())
    with pytest.raises(CheckpointError, match=r"other\.pt is missing"):
        read_checkpoint(tmp_path / "other.pt", digest, network())


def test_a_run_continues_adam_and_warms_up_from_its_own_start(tmp_path: Path) -> None:
    base = ["benchmark=openfold", "scale=test", "device=cpu", "micro_batch=4"]
    layout = Layout(device=torch.device("cpu"))
    run, _ = loading.load(compose(base), lambda _: OpenFold)
    model = OpenFold(run, layout).model
    zeros = {number: torch.full_like(p, 0.5) for number, p in enumerate(model.parameters())}
    state = {
        number: {"step": torch.tensor(float(STEPS)), "exp_avg": 0 * value, "exp_avg_sq": value}
        for number, value in zeros.items()
    }
    weights = {name: torch.full_like(tensor, 0.01) for name, tensor in model.state_dict().items()}
    groups = [{"params": list(zeros), "lr": 1.0}]
    digest = written(
        tmp_path / "start.pt",
        {"alphafold_state_dict": weights, "optimizer_state_dict": {"state": state, "param_groups": groups}},
    )
    settings = [
        f"assets_dir={tmp_path}", "model.initial_checkpoint=start.pt", f"benchmark.facts.checkpoint_sha256={digest}",
        "hparams.warmup_steps=10",
    ]  # fmt: skip
    run, _ = loading.load(compose([*base, *settings]), lambda _: OpenFold)
    workload = OpenFold(run, layout)
    step = workload.build_step()
    workload.load_start()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in workload.model.state_dict().items())
    result = step([next(iter(workload.example_batches()))])
    metrics = step.read(result.names, result.values.tolist()).metrics
    assert metrics["learning_rate"] == pytest.approx(run.workload.hparams.warmup_init)
    assert run.declaration.derived_values["checkpoint"] == digest
