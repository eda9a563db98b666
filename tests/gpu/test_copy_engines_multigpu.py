"""Gradients and weights moved by copy engines: two GPUs get the bits of NCCL's collectives, captured or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from common.data.batches import Batch
from common.distributed.layout import Layout
from common.optim.adaptive import LAMB, Adagrad, Adam, AdamW
from common.optim.learning_rate import constant
from common.optim.momentum import LARS, SGD
from common.optim.peer_exchange import add_pieces
from common.run.kernel_profile import COMMUNICATION, kind_of, recorded
from common.step.train_step import Losses
from tests.gpu.test_optim_multigpu import CLIPS, ITERATIONS, Trainee

pytestmark = pytest.mark.multigpu

LONG = 200
DELAY = 1_000_000  # cycles, about 0.5 ms
BF16, LAMB_RULE = torch.bfloat16, LAMB(0.9, 0.99, 1e-6)
CLIPPED_IN_SUM: dict[str, Any] = {"rule": LAMB_RULE, "clip": CLIPS["before_reduction"], "micro_batches": 1}
CASES: dict[str, dict[str, Any]] = {
    "lars": {"rule": LARS(0.9, eta=0.01)},
    "sgd": {"rule": SGD(0.9, nesterov=True)},
    "lamb": {"rule": LAMB_RULE},
    "adamw": {"rule": AdamW()},
    "adam, fp32 gradients": {"rule": Adam(), "gradients": "fp32", "masters": "remainder"},
    "adagrad": {"rule": Adagrad()},
    "lamb, fp32": {"rule": LAMB_RULE, "dtype": torch.float32},
    "lamb, fp16, clipped": {"rule": LAMB_RULE, "dtype": torch.float16, "clip": CLIPS["after_reduction"]},
    "clipped before the sum": {**CLIPPED_IN_SUM, "micro_batches": 2},
    "clipped in the sum": CLIPPED_IN_SUM,
    "clipped in the sum, fp32": {**CLIPPED_IN_SUM, "dtype": torch.float32},
    "after the passes": {"rule": LAMB_RULE, "overlap": False},
}
WAYS: dict[str, dict[str, Any]] = {
    "nccl": {"exchange": "collectives", "captured": True},
    "captured": {"exchange": "copy_engines", "captured": True},
    "eager": {"exchange": "copy_engines", "captured": False},
}


class DelayedTrainee(Trainee):
    """A wider network, whose forward pass is slower on the last rank, so that the other ranks are ahead.

    It learns to give its input back, as far as the last ReLU lets it.
    """

    width = 1024
    schedule = staticmethod(constant(0.003))

    def __init__(self, layout: Layout, dtype: torch.dtype = BF16, **options: Any) -> None:
        super().__init__(layout, dtype, shard="all", **options)
        self.warm_up()

    def loss(self, batch: Batch) -> Losses:
        if self.layout.rank == self.layout.world_size - 1:
            torch.cuda._sleep(DELAY)
        x_BC = batch.tensors["x"]
        value = (self.model(x_BC) - x_BC).float().square().mean()
        return Losses(value, {"loss": value})


def train(layout: Layout, iterations: int, **options: Any) -> dict[str, Tensor]:
    """Return the losses of all steps, summed over the ranks, this rank's state, and the weights at the end."""
    trainee = DelayedTrainee(layout, **options)
    losses = torch.stack([trainee.iterate(iteration)[2] for iteration in range(iterations)])
    own = {f"own {name}": tensor.cpu() for name, tensor in trainee.state().items()}
    return {"losses": losses.cpu(), **own, **trainee.result()}


def kinds_of_transfers(layout: Layout) -> dict[str, str]:
    """Return the kind of each copy and collective in a captured step, by its name in the profiler."""
    trainee = DelayedTrainee(layout, rule=LAMB_RULE, **WAYS["captured"])
    kernels, _ = recorded(lambda: trainee.iterate(0), lambda: trainee.iterate(1))
    trainee.result()
    wanted = ("memcpy", "nccl", "barrier")
    return {k.name: kind_of(k.name) for k in kernels if any(word in k.name.lower() for word in wanted)}


def sums(device: torch.device, dtype: torch.dtype, clipped: bool) -> bool:
    """Return whether the kernel's sum has the bits of PyTorch's on the CPU."""
    draw = torch.Generator().manual_seed(0)
    own, slots = (torch.randn(size, generator=draw).to(dtype) for size in ((9792,), (7, 9792)))
    factors, ours = torch.rand(8, generator=draw), slots.to(device)
    here, there = (factors[0], factors[0].to(device)) if clipped else (None, None)
    add_pieces(own.to(device), ours, ours[0], there, factors[1:].to(device))
    add_pieces(own, slots, slots[0], here, factors[1:])
    return torch.equal(ours.cpu(), slots)


def run_rank(rank: int, world: int, folder: Path) -> dict[str, Any]:
    layout = Layout({"dp": world}, rank, device=f"cuda:{rank}")
    dtypes = (torch.float32, torch.float16, BF16)
    found: dict[str, Any] = {"sums": [sums(layout.device, dtype, clip) for dtype in dtypes for clip in (False, True)]}
    found["kinds"] = kinds_of_transfers(layout)
    for name, case in CASES.items():
        found[name] = {way: train(layout, ITERATIONS, **case, **options) for way, options in WAYS.items()}
    found["long"] = {way: train(layout, LONG, **CLIPPED_IN_SUM, **WAYS[way]) for way in ("nccl", "captured")}
    return found


def differing(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    return [name for name, tensor in one.items() if not torch.equal(tensor, other[name])]


@pytest.mark.parametrize("case", list(CASES))
def test_captured_copies_give_the_bits_of_eager_ones(ranks, case):
    assert [differing(rank[case]["captured"], rank[case]["eager"]) for rank in ranks] == [[]] * len(ranks)


@pytest.mark.parametrize("case", list(CASES))
def test_copies_give_two_ranks_the_bits_of_nccl(ranks, case):
    if len(ranks) > 2:
        pytest.skip("NCCL rounds each partial sum of more than two ranks")
    assert [differing(rank[case]["captured"], rank[case]["nccl"]) for rank in ranks] == [[]] * 2


def test_the_losses_of_two_hundred_steps_are_those_with_nccl(ranks):
    for rank in ranks:
        copied, expected = rank["long"]["captured"]["losses"], rank["long"]["nccl"]["losses"]
        assert len(expected.unique()) > LONG // 2
        assert torch.allclose(copied, expected, rtol=0.0 if len(ranks) == 2 else 1e-2, atol=0.0)


def test_all_ranks_end_with_the_same_bits(ranks):
    weights = {n: w for n, w in ranks[0]["long"]["captured"].items() if not n.startswith("own")}
    assert len(weights) > 10
    assert [differing(weights, other["long"]["captured"]) for other in ranks[1:]] == [[]] * (len(ranks) - 1)


def test_copies_between_gpus_count_as_communication(ranks):
    for rank in ranks:
        assert {kind for name, kind in rank["kinds"].items() if name.startswith("Memcpy PtoP")} == {COMMUNICATION}
        assert not any("ReduceScatter" in name for name in rank["kinds"])


def test_the_kernel_adds_like_pytorch(ranks):
    assert [rank["sums"] for rank in ranks] == [[True] * 6] * len(ranks)
