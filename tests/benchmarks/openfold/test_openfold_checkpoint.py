"""The checkpoint from which OpenFold's rules start: names, shapes, the state of Adam, and what is refused."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.openfold.checkpoint import read_checkpoint
from benchmarks.openfold.workload import OpenFold
from common.config import loading
from common.config.composition import compose
from common.distributed.layout import Layout
from common.errors import CheckpointError
from tests.benchmarks.openfold.small_folds import batch, network

STEPS = 75


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
    content = {"alphafold_state_dict": model.state_dict(), "optimizer_state_dict": state}
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
    for number, (name, weight) in enumerate(content["alphafold_state_dict"].items()):
        state = content["optimizer_state_dict"]["state"][number]
        expected = (weight, state["exp_avg"], state["exp_avg_sq"])
        assert all(map(torch.equal, start.tensors[name], expected)), name


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
    hparams = run.workload.hparams
    expected = hparams.warmup_init + (hparams.base_learning_rate - hparams.warmup_init) / 10
    assert metrics["learning_rate"] == pytest.approx(expected)
    assert run.declaration.derived_values["checkpoint"] == digest
