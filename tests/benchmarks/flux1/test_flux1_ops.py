"""References of FLUX.1's operations against formulas, numerical gradients and casts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from benchmarks.flux1.ops.gated_residual import gated_residual_reference
from benchmarks.flux1.ops.modulated_norm import modulated_norm_reference
from benchmarks.flux1.ops.qk_norm_rope import QK_NORM_ROPE, QkvStream, qk_norm_rope_reference
from common.ops.fp8_cast.reference import E4M3, E5M2, Fp8Tensor, Handover, Scaling, computed_reference
from common.ops.operation import OperationRequest

N, L, E, H, D = 3, 4, 6, 2, 4
EPSILON = 1e-3


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()


def scaling() -> Scaling:
    return Scaling(torch.tensor(3.7), torch.zeros(2, dtype=torch.int32))


def test_a_modulated_row_has_the_scale_and_shift_of_its_sample():
    x_RE, scale_NE, shift_NE = normal(N * L, E), normal(N, E, seed=1), normal(N, E, seed=2)
    again_RE, y_RE = modulated_norm_reference(x_RE, scale_NE, shift_NE, EPSILON)
    assert again_RE is x_RE
    for row in range(N * L):
        x_E, sample = x_RE[row], row // L
        centred_E = x_E - x_E.sum() / E
        normal_E = centred_E / ((centred_E**2).sum() / E + EPSILON) ** 0.5
        torch.testing.assert_close(y_RE[row], (1 + scale_NE[sample]) * normal_E + shift_NE[sample])


def test_gradients_of_the_modulated_norm_are_numerical_ones():
    given = normal(N * L, E), normal(N, E, seed=1), normal(N, E, seed=2)
    assert torch.autograd.gradcheck(lambda *each: modulated_norm_reference(*each, EPSILON), given)


def test_a_modulated_row_in_fp8_is_the_cast_of_the_unrounded_row():
    given = [normal(*shape, dtype=torch.bfloat16) for shape in ((N * L, E), (N, E), (N, E))]
    _, wide_RE = modulated_norm_reference(*(each.float() for each in given), EPSILON)
    expected = computed_reference(wide_RE, scaling(), E4M3, torch.bfloat16)
    x_RE, found = modulated_norm_reference(*given, EPSILON, fp8=scaling())
    assert isinstance(found, Fp8Tensor)
    assert torch.equal(found.data.view(torch.uint8), expected.data.view(torch.uint8))
    (x_RE.sum() + found.source.sum()).backward()
    torch.testing.assert_close(given[2].grad.float(), torch.full((N, E), float(L)))


@pytest.mark.parametrize("two", [False, True])
def test_a_branch_is_added_with_the_gate_of_its_sample(two):
    x_RE, delta_RE, bias_E, gate_NE = normal(N * L, E), normal(N * L, E, seed=1), normal(E), normal(N, E)
    other_RE = normal(N * L, E, seed=2) if two else None
    found_RE = gated_residual_reference(x_RE, delta_RE, other_RE, bias_E, gate_NE)
    for row in range(N * L):
        branch_E = delta_RE[row] + bias_E + (other_RE[row] if other_RE is not None else 0.0)
        torch.testing.assert_close(found_RE[row], x_RE[row] + gate_NE[row // L] * branch_E)
    given = x_RE, delta_RE, other_RE, bias_E, gate_NE
    assert torch.autograd.gradcheck(gated_residual_reference, given)


def test_both_products_receive_one_gradient_in_fp8():
    x_RE, delta_RE, other_RE = (normal(N * L, E, seed=seed, dtype=torch.bfloat16) for seed in range(3))
    bias_E, gate_NE = normal(E, dtype=torch.bfloat16), normal(N, E, dtype=torch.bfloat16)
    handovers = [Handover(scaling()), Handover(Scaling(torch.tensor(1.0), torch.zeros(2, dtype=torch.int32)))]
    dy_RE = normal(N * L, E, seed=5, dtype=torch.bfloat16).detach()
    gated_residual_reference(x_RE, delta_RE, other_RE, bias_E, gate_NE, handovers=handovers).backward(dy_RE)
    wide_RE = dy_RE.float() * gate_NE.float().repeat_interleave(L, 0)
    expected = computed_reference(wide_RE, scaling(), E5M2, torch.bfloat16)
    taken = [handover.take() for handover in handovers]
    assert taken[0] is taken[1]
    assert taken[0] is not None
    assert torch.equal(taken[0].data.view(torch.uint8), expected.data.view(torch.uint8))
    torch.testing.assert_close(bias_E.grad.float(), wide_RE.sum(0), rtol=1e-2, atol=1e-2)
    assert handovers[1].scaling.scale == 1.0


def stream(tokens: int, seed: int) -> QkvStream:
    return QkvStream(
        normal(N * tokens, 3 * H * D, seed=seed),
        normal(3 * H * D, seed=seed),
        *(normal(D, seed=seed + part) for part in range(2)),
        tokens,
    )


def test_heads_are_normalised_and_their_pairs_rotated_like_complex_numbers():
    streams = [stream(L, 1), stream(2, 7)]
    angles_LJ = normal(L + 2, D // 2).detach()
    found = qk_norm_rope_reference(streams, angles_LJ.cos(), angles_LJ.sin(), EPSILON)
    first = 0
    for each in streams:
        rows = (each.qkv + each.bias).view(N, each.tokens, 3, H, D)
        for token in range(each.tokens):
            for part, weight_D in enumerate((each.q_weight, each.k_weight, None)):
                expected_NHD = rows[:, token, part]
                if weight_D is not None:
                    square_NH1 = (expected_NHD**2).sum(-1, keepdim=True) / D
                    expected_NHD = expected_NHD / (square_NH1 + EPSILON).sqrt() * weight_D
                    turned = torch.polar(torch.ones(D // 2, dtype=torch.float64), angles_LJ[first + token])
                    complex_NHJ = torch.view_as_complex(expected_NHD.unflatten(-1, (-1, 2)).contiguous())
                    expected_NHD = torch.view_as_real(complex_NHJ * turned).flatten(-2)
                torch.testing.assert_close(found[part][:, first + token], expected_NHD)
        first += each.tokens


def test_gradients_of_norm_and_rotation_are_numerical_ones():
    cos_LJ, sin_LJ = (normal(L, D // 2, seed=seed).detach() for seed in range(2))
    own = stream(L, 1)
    assert torch.autograd.gradcheck(
        lambda *each: qk_norm_rope_reference([QkvStream(*each, L)], cos_LJ, sin_LJ, EPSILON), own[:4]
    )


@pytest.mark.parametrize(("size", "refused"), [(128, False), (2, False), (1, True), (96, True)])
def test_kernels_of_norm_and_rotation_need_heads_of_a_power_of_two(monkeypatch, size, refused):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    reason = QK_NORM_ROPE.unsupported(
        "triton", OperationRequest(torch.device("cpu"), torch.bfloat16, {"head_size": size})
    )
    assert (reason == f"head_size is a power of two, not {size}") == refused
