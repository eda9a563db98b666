"""Update rules on a GPU: captured against eager updates, nothing that waits for the device, and LAMB against apex."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from common.ops.cases import Draw
from common.ops.catalogue import cases_of
from common.ops.operation import Operation
from common.optim.adaptive import ADAGRAD, ADAPTIVE, LAMB
from common.optim.momentum import MOMENTUM
from common.optim.rules import Binding
from common.optim.update_cases import DECAY_AND_RATIO, bert, shard_of
from tests.gpu.captures import captured

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DEVICE = torch.device("cuda")
MEDIUM = bert(256, 4, 8000)


def iterated(operation: Operation, name: str, sizes: Mapping[str, Any]) -> tuple[Callable[[], None], list[Tensor]]:
    """Return a function that measures and updates, and the tensors that it writes, of the first case in bf16."""
    passes = cases_of(operation)[0].passes(operation.function(name), Draw(DEVICE, torch.bfloat16), **sizes)

    def tensors(found: Any) -> Iterator[Tensor]:
        if isinstance(found, Tensor):
            yield found
        else:
            for each in found:
                yield from tensors(each)

    def iteration() -> None:
        for each in passes:
            each.run()

    written = list(tensors([each.run() for each in passes]))
    return iteration, written


@pytest.mark.parametrize("operation", [ADAPTIVE, MOMENTUM, ADAGRAD], ids=lambda operation: operation.name)
@pytest.mark.parametrize("name", ["triton", "reference"])
def test_captured_updates_equal_eager_ones_and_wait_for_nothing(operation: Operation, name: str) -> None:
    sizes = {"rate": 0.25, **({"shards": (MEDIUM,)} if operation is ADAPTIVE else {})}
    (eager, expected), (replayed, found) = (iterated(operation, name, sizes) for _ in range(2))
    graph, _ = captured(replayed)
    for _ in range(2):
        graph.replay()
    for _ in range(4):
        eager()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def fused_lamb() -> type:
    """NVIDIA's LAMB; the package that the registry has under the name of apex is another, and has none."""
    try:
        from apex.multi_tensor_apply import multi_tensor_applier
        from apex.optimizers import FusedLAMB
    except ImportError as error:
        pytest.skip(f"NVIDIA's apex with FusedLAMB is not installed: {error}")
    if not multi_tensor_applier.available:
        pytest.skip("NVIDIA's apex was built without its CUDA extensions")
    return FusedLAMB


@pytest.mark.parametrize("clipped", [False, True])
def test_lamb_equals_apex(clipped):
    lamb = fused_lamb()
    draw = Draw(DEVICE, torch.float32)
    shard = shard_of(draw, MEDIUM, torch.float32, weight_scale=0.02)
    update = LAMB(0.9, 0.999, 1e-6).bind(Binding([shard], DECAY_AND_RATIO, len(MEDIUM), lambda _: None), "triton")
    parts = [slice(f.start, f.start + f.numel) for f in shard.fragments]
    parameters = [nn.Parameter(shard.masters[part].clone()) for part in parts]
    groups = [
        {
            "params": [p for p, f in zip(parameters, shard.fragments, strict=True) if f.group == number],
            "weight_decay": settings.weight_decay,
        }
        for number, settings in enumerate(DECAY_AND_RATIO)
    ]
    bound = 1.0 if clipped else 1e9
    theirs = lamb(groups, lr=0.01, betas=(0.9, 0.999), eps=1e-6, max_grad_norm=bound, use_nvlamb=False)
    rates_G, write = torch.full((2,), 0.01, device=DEVICE), torch.ones((), dtype=torch.bool, device=DEVICE)
    for step in range(5):
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.grad = draw.normal(len(parameter))
            shard.gradients[part] = parameter.grad
        factor = min(1.0, bound / shard.gradients.double().norm().item())
        update.apply(rates_G, torch.full((), step, device=DEVICE), torch.full((), factor, device=DEVICE), write)
        theirs.step()
    for parameter, part in zip(parameters, parts, strict=True):
        torch.testing.assert_close(shard.masters[part], parameter.detach(), rtol=2e-5, atol=2e-6)
