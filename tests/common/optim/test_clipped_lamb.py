"""LAMB as MLPerf RNN-T has it: decay and ratio on every parameter, a tiny epsilon, the mean gradient clipped."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from adaptive_oracle import lamb_steps
from update_oracle import rate_table

from common.distributed.layout import Layout
from common.optim.adaptive import LAMB
from common.optim.optimizer import ClipNorm, Optimizer, ParameterGroup
from common.step.train_step import apply_gradients

RATES = [0.25, 0.125, 0.5, 0.125]
SHAPES = {"weight_hh": (32, 8), "bias_hh": (32,), "embedding": (9, 8)}
DIVISOR = 4.0


@pytest.mark.parametrize(
    ("dtype", "rtol"), [(torch.float64, 1e-12), (torch.float32, 2e-5), (torch.float16, 2e-5)], ids=str
)
def test_every_parameter_decays_by_its_ratio_after_the_clip(dtype, rtol):
    generator = torch.Generator().manual_seed(5)
    parameters = {
        name: torch.nn.Parameter((0.1 * torch.randn(shape, generator=generator)).to(dtype))
        for name, shape in SHAPES.items()
    }
    starts = {name: parameter.detach().double().numpy().copy() for name, parameter in parameters.items()}
    gradients = [
        {name: (scale * torch.randn(shape, generator=generator)).to(dtype) for name, shape in SHAPES.items()}
        for scale in (1.0, 0.25, 8.0, 0.01)
    ]
    for gradient in gradients:
        gradient["embedding"][3] = 0.0  # a piece that no transcript has: 0 / (0 + epsilon)
    optimizer = Optimizer(
        [ParameterGroup(parameters, weight_decay=1e-3, trust_ratio=True)], LAMB(0.9, 0.999, 1e-9), rate_table(RATES),
        Layout(), grad_divisor=DIVISOR, clip=ClipNorm(1.0, "after_reduction"),
    )  # fmt: skip
    clipped: list[dict[str, np.ndarray]] = []
    for gradient in gradients:
        optimizer.begin()
        for name, parameter in parameters.items():
            assert parameter.grad is not None
            parameter.grad.add_(gradient[name])
        optimizer.arm()
        optimizer.collect()
        assert not apply_gradients([optimizer], torch.tensor(0.0))
        mean = {name: value.double().numpy() / DIVISOR for name, value in gradient.items()}
        norm = np.sqrt(sum(np.square(value).sum() for value in mean.values()))
        clipped.append({name: value * min(1.0, 1.0 / (norm + 1e-6)) for name, value in mean.items()})
    norms = [np.sqrt(sum(np.square(value).sum() for value in mean.values())) for mean in clipped]
    assert norms[0] == pytest.approx(1.0, abs=1e-5), "some are clipped"
    assert norms[3] < 0.5, "and some are not"
    found = optimizer.state_dict().get("masters") or {name: p.detach() for name, p in parameters.items()}
    for name, start in starts.items():
        knobs = {"beta1": 0.9, "beta2": 0.999, "epsilon": 1e-9, "weight_decay": 1e-3}
        expected, _, _ = lamb_steps(start, [mean[name] for mean in clipped], RATES, **knobs)
        np.testing.assert_allclose(found[name].double().numpy(), expected, rtol=rtol, atol=rtol * 0.1, err_msg=name)
