"""RetinaNet's evaluation on a GPU: captured as a whole, equal to an eager pass, and without a wait for the device."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from benchmarks.retinanet.workload import RetinaNetDetection
from common import cli
from common.config.composition import compose
from common.data.batches import HostBatch
from common.detection.detections import Found
from common.distributed.layout import Layout

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def built(precision: str) -> RetinaNetDetection:
    """The workload of the ``test`` recipe, whose heads say something, so that most slots are filled."""
    overrides = ["scale=test", f"precision={precision}", "benchmark.facts.score_threshold=0.001"]
    run, _ = cli.load(compose(["benchmark=retinanet", *overrides]))
    workload = RetinaNetDetection(run, Layout(run.layout, device=torch.device("cuda", 0), seed=7))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in workload.model.head.parameters():
            if parameter.ndim == 4:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return workload


def copied(found: Found) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in vars(found).items() if tensor is not None}


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_a_captured_pass_finds_what_an_eager_one_does_and_reads_its_batch(precision: str) -> None:
    workload, stream = built(precision), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        evaluation = workload.evaluation(workload.layout)
        evaluation.warm_up()
        (forward,) = evaluation._forward.values()
        assert forward._recorded is not None
        inputs = {name: tensor.clone() for name, tensor in forward.inputs.items()}
        image = torch.randn(inputs["image"].shape, generator=torch.Generator().manual_seed(2))
        batch = inputs | {"image": inputs["image"].copy_(image)}
        with forward.evaluating(workload.weights()):
            captured = copied(forward(batch))
            torch.cuda.set_sync_debug_mode("error")
            try:
                eager = forward._function(forward.inputs)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            eager = copied(eager)
            larger = copied(forward(batch | {"size": 2 * batch["size"]}))
            other = copied(forward(batch | {"image": batch["image"].flip(3)}))
        stream.synchronize()
    assert captured["there"][:, 0].all()
    torch.testing.assert_close(captured["score"][:, 0], eager["score"][:, 0], rtol=2e-2, atol=0)
    if precision == "fp32":  # of narrow logits many are equal, whose order is anyone's
        assert torch.equal(captured["there"], eager["there"])
        for name in ("score", "box"):
            torch.testing.assert_close(captured[name], eager[name], rtol=1e-3, atol=1e-2)
        torch.testing.assert_close(larger["box"], 2 * captured["box"], rtol=1e-3, atol=2e-2)
    assert not torch.equal(other["score"], captured["score"])


def test_targets_are_made_without_a_wait() -> None:
    workload = built("fp16")
    host = HostBatch(
        {
            "image": torch.zeros(2, 3, 64, 64, dtype=torch.float16).pin_memory(),
            "boxes": torch.tensor([[[0.0, 0.0, 32.0, 32.0]], [[0.0, 0.0, 0.0, 0.0]]]).pin_memory(),
            "label": torch.tensor([[2], [0]]).pin_memory(),
            "count": torch.tensor([1, 0]).pin_memory(),
        },
        samples=2,
        position=0,
    )
    workload.prepare(host)
    torch.cuda.set_sync_debug_mode("error")
    try:
        batch = workload.prepare(host)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert (batch.tensors["class"][0] == 2).any()
    assert (batch.tensors["class"][1] == -1).all()
