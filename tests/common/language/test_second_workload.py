"""A tiny second language workload: another norm, another activation, and an MLP that is replaced by two experts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.llama31_8b.data import ROWS
from common import cli
from common.config.composition import compose
from common.distributed.layout import Layout
from common.language.architecture import GELU_MLP, LAYER_1P, Activation, LlamaArchitecture, NormKind
from common.language.network import Building
from common.language.pretraining import Pretraining, RowFacts
from common.optim.learning_rate import constant


class TwoExperts(nn.Module):
    """Two MLPs with squared ReLU, mixed by a gate; every rank has them whole."""

    def __init__(self, build: Building) -> None:
        super().__init__()
        hidden, features = build.architecture.hidden, build.architecture.feed_forward
        given = {"device": build.device, "dtype": build.dtype}
        self.gate = nn.Parameter(torch.empty(2, hidden, **given))
        self.up = nn.Parameter(torch.empty(2 * features, hidden, **given))
        self.down = nn.Parameter(torch.empty(hidden, 2 * features, **given))

    def forward(self, x_sE: Tensor) -> Tensor:
        """Map normalised hidden states to the addition to the residual stream."""
        shares_s2 = F.linear(x_sE, self.gate).softmax(-1)
        act_s2F = F.linear(x_sE, self.up).relu().square().unflatten(1, (2, -1)) * shares_s2.unsqueeze(2)
        return F.linear(act_s2F.flatten(1), self.down)


@dataclasses.dataclass(frozen=True)
class TinyFacts(LlamaArchitecture):
    """Rotary positions and grouped queries, but LayerNorm and GELU."""

    row_length: int
    max_grad_norm: float

    norm: ClassVar[NormKind] = LAYER_1P
    activation: ClassVar[Activation] = GELU_MLP


class ExpertFacts(TinyFacts):
    """The same with another MLP."""

    mlp: ClassVar[type[nn.Module] | None] = TwoExperts


class Tiny(Pretraining):
    """Rows of synthetic tokens."""

    title = "Tiny"
    rows = ROWS
    axes: ClassVar[Mapping[str, str]] = {"dp": "have other rows"}

    def learning_rate(self) -> Callable[[Tensor], Tensor]:
        """Return a constant rate."""
        return constant(0.01)

    @property
    def row_facts(self) -> RowFacts:
        """Constants of the data."""
        return RowFacts(self.own.facts.vocabulary, self.own.facts.row_length, eval_rows=7, index_rows=64)


def built(facts: type[TinyFacts], *overrides: str) -> Tiny:
    """A workload with the configuration of another one, but with its own facts."""
    run, _ = cli.load(compose(["benchmark=llama31_8b", "scale=test", "device=cpu", *overrides]))
    own = dataclasses.replace(
        run.workload,
        facts=facts(
            vocabulary=90, hidden=32, layers=2, heads=4, kv_heads=2, head_size=8, feed_forward=48, norm_epsilon=1e-5,
            rope_base=100.0, initializer_range=0.15, row_length=24, max_grad_norm=1.0,
        ),
    )  # fmt: skip
    return Tiny(dataclasses.replace(run, workload=own), Layout(run.layout, seed=3))


@pytest.mark.parametrize("facts", [TinyFacts, ExpertFacts])
def test_handwritten_passes_are_those_of_autograd(facts):
    losses, gradients = [], []
    for blocks in ("handwritten", "autograd"):
        workload = built(facts, "precision=fp64", f"model.blocks={blocks}")
        (batch,) = workload.example_batches()
        for _ in range(2):  # gradients of two micro-batches add up
            loss = workload.loss(batch).total
            loss.backward()
        losses.append(loss.detach())
        gradients.append({name: parameter.grad for name, parameter in workload.model.named_parameters()})
    torch.testing.assert_close(*losses, rtol=1e-12, atol=0.0)
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], rtol=1e-9, atol=1e-13, msg=name)


@pytest.mark.parametrize("facts", [TinyFacts, ExpertFacts])
@pytest.mark.parametrize("precision", [("fp32", "torch"), ("bf16", "fp8")])
def test_it_learns_a_row(facts, precision):
    workload = built(facts, f"precision={precision[0]}", f"model.linear={precision[1]}", "hparams.global_batch_size=2")
    step, (batch,) = workload.build_step(), workload.example_batches()
    results = [step([batch]) for _ in range(20)]
    losses = [step.read(result.names, result.values.tolist()).metrics["loss"] for result in results]
    assert losses[-1] < 0.5 * losses[0]


def test_the_experts_are_parameters_of_the_block():
    workload = built(ExpertFacts)
    names = {name for name, _ in workload.model.named_parameters() if name.startswith("layers.0.m")}
    assert names == {
        f"layers.0.{each}" for each in ("mlp_norm.weight", "mlp_norm.bias", "mlp.gate", "mlp.up", "mlp.down")
    }
    assert {"layer_norm", "rope"} <= workload.choices.keys()
    assert "bias_gelu" not in workload.choices
