"""AlphaFold2 against transformers' ESMFold and float64 sums, its sizes, recycling, dropout, symmetries and dtypes."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from transformers.models.esm import modeling_esmfold as esm
from transformers.models.esm.openfold_utils import Rigid, Rotation

from benchmarks.openfold import geometry
from benchmarks.openfold.config import Facts
from benchmarks.openfold.evoformer import (
    ColumnAttention,
    EvoformerBlock,
    GlobalColumnAttention,
    OuterProductMean,
    RowAttention,
    TriangleAttention,
    TriangleMultiplication,
)
from benchmarks.openfold.geometry import Frames, ResidueTables
from benchmarks.openfold.labels import labels_of
from benchmarks.openfold.layers import Masks
from benchmarks.openfold.losses import all_losses
from benchmarks.openfold.model import AlphaFold
from benchmarks.openfold.structure import InvariantPointAttention, StructureModule
from benchmarks.openfold.workload import forward_flops
from common.mlperf.fixed import fixed_facts
from tests.benchmarks.openfold.small_folds import (
    CPU,
    EXTRA,
    FEATURES,
    MAIN,
    SIZES,
    SPLIT,
    STRUCTURE,
    WEIGHTS,
    batch,
    chooser,
    generator,
    network,
    randomised,
)

N, S = 7, 5
OFF = Masks(torch.tensor(0), 0, active=False)


def noise(*shape: int, seed: int = 5) -> Tensor:
    return torch.randn(shape, generator=generator(seed), dtype=torch.float64)


def chain_mask(*shape: int) -> Tensor:
    return (torch.rand(shape, generator=generator(6)) < 0.8).to(torch.float64)


# --- sizes ---


def test_the_rules_network_has_the_parameters_and_tensors_of_the_reference() -> None:
    with torch.device("meta"):
        model = AlphaFold(fixed_facts(Facts, "openfold"), chooser(), SPLIT)
    counts = {name: sum(p.numel() for p in part.parameters()) for name, part in model.named_children()}
    assert counts == {
        "input_embedder": 33_024,
        "recycling_embedder": 2_816,
        "template_angle_embedder": 80_640,
        "template_pair_embedder": 5_696,
        "template_pair_stack": 218_368,
        "template_pointwise_attention": 24_704,
        "extra_msa_embedder": 1_664,
        "extra_msa_stack": 2_805_248,
        "evoformer_stack": 87_936_384,
        "structure_module": 2_019_116,
        "auxiliary_heads": 101_422,
    }
    assert sum(counts.values()) == 93_229_082
    assert len(list(model.parameters())) == 5_044


@pytest.mark.slow
def test_a_pass_has_the_flops_that_the_sizes_give() -> None:
    found = {name: flops / 1e12 for name, flops in forward_flops(fixed_facts(Facts, "openfold")).items()}
    assert found[""] == pytest.approx(11.80, abs=0.01)
    parts = {"evoformer_stack": 10.372, "extra_msa_stack": 1.190, "structure_module": 0.012, "input_embedder": 0.002}
    assert {name: found[name] for name in parts} == pytest.approx(parts, abs=0.002)
    templates = sum(found[name] for name in found if name.startswith("template"))
    assert templates == pytest.approx(0.225, abs=0.001)


# --- the trunk ---


@pytest.mark.parametrize("outgoing", [True, False])
def test_triangle_multiplication_is_that_of_esmfold(outgoing: bool) -> None:
    sizes = dataclasses.replace(MAIN, multiplication=MAIN.pair)  # ESMFold has one width
    mine = randomised(TriangleMultiplication(sizes, outgoing, chooser(), SPLIT))
    theirs = esm.EsmFoldTriangleMultiplicativeUpdate(SimpleNamespace(pairwise_state_dim=MAIN.pair), outgoing).double()
    theirs.load_state_dict(mine.state_dict())
    z, mask = noise(2, N, N, MAIN.pair), chain_mask(2, N, N)
    torch.testing.assert_close(mine(z, mask, OFF), z + theirs(z, mask))


@pytest.mark.parametrize("starting", [True, False])
def test_triangle_attention_is_that_of_esmfold(starting: bool) -> None:
    mine = randomised(TriangleAttention(MAIN, starting, chooser(), SPLIT))
    theirs = esm.EsmFoldTriangleAttention(MAIN.pair, MAIN.pair_head, MAIN.pair_heads, starting).double()
    theirs.load_state_dict(mine.state_dict())
    z, mask = noise(2, N, N, MAIN.pair), chain_mask(2, N, N)
    torch.testing.assert_close(mine(z, mask, OFF), z + theirs(z, mask))


def normed(x: Tensor, layer: torch.nn.LayerNorm) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * layer.weight + layer.bias


def gated_attention(x_BSNC: Tensor, mask_BSN: Tensor, bias_BHNN: Tensor | float, layer, heads: int) -> Tensor:
    """Attention over N, written as sums."""
    q, k, v, g = (
        torch.einsum("bsnc,hwc->bsnhw", x_BSNC, getattr(layer, f"linear_{name}").weight.unflatten(0, (heads, -1)))
        for name in "qkvg"
    )
    gate = torch.sigmoid(g + layer.linear_g.bias.view(heads, -1))
    scores = torch.einsum("bsihw,bsjhw->bshij", q, k) / math.sqrt(q.shape[-1]) + bias_BHNN
    weights = torch.exp(scores - scores.amax(-1, keepdim=True)) * mask_BSN[:, :, None, None]
    weights = weights / weights.sum(-1, keepdim=True)
    o = torch.einsum("bshij,bsjhw->bsihw", weights, v) * gate
    return torch.einsum("bsnhw,chw->bsnc", o, layer.linear_o.weight.unflatten(1, (heads, -1))) + layer.linear_o.bias


def test_row_attention_is_a_sum_over_residues_with_a_bias_of_pairs() -> None:
    layer = randomised(RowAttention(MAIN, chooser(), SPLIT))
    m, z, mask = noise(2, S, N, MAIN.msa), noise(2, N, N, MAIN.pair, seed=8), chain_mask(2, S, N)
    bias = torch.einsum("bijz,hz->bhij", normed(z, layer.layer_norm_z), layer.linear_z.weight)[:, None]
    expected = gated_attention(normed(m, layer.layer_norm_m), mask, bias, layer.mha, MAIN.msa_heads)
    torch.testing.assert_close(layer(m, z, mask), expected)


def test_column_attention_is_a_sum_over_sequences() -> None:
    layer = randomised(ColumnAttention(MAIN, chooser()))
    m, mask = noise(2, S, N, MAIN.msa), chain_mask(2, S, N)
    mask[:, 0] = 1
    turned = normed(m, layer.layer_norm_m).transpose(1, 2), mask.transpose(1, 2)
    expected = gated_attention(*turned, 0.0, layer.mha, MAIN.msa_heads).transpose(1, 2)
    torch.testing.assert_close(layer(m, mask), expected)


def test_global_attention_has_one_query_for_each_residue() -> None:
    layer = randomised(GlobalColumnAttention(EXTRA, chooser()))
    m, mask = noise(1, S, N, EXTRA.msa), chain_mask(1, S, N)
    mask[:, 0] = 1
    inner, x = layer.global_attention, normed(m, layer.layer_norm_m)
    expected = torch.zeros_like(m)
    for n in range(N):
        rows, keep = x[0, :, n], mask[0, :, n].bool()
        q = (inner.linear_q.weight @ rows[keep].mean(0)).view(EXTRA.msa_heads, -1)
        k, v = rows[keep] @ inner.linear_k.weight.T, rows[keep] @ inner.linear_v.weight.T
        o = torch.softmax(q @ k.T / math.sqrt(q.shape[1]), -1) @ v
        gate = torch.sigmoid(rows @ inner.linear_g.weight.T + inner.linear_g.bias)
        expected[0, :, n] = (gate * o.flatten()) @ inner.linear_o.weight.T + inner.linear_o.bias
    torch.testing.assert_close(layer(m, mask), expected)


def test_outer_product_mean_is_a_mean_over_the_sequences_that_both_residues_have() -> None:
    layer = randomised(OuterProductMean(MAIN, chooser(), SPLIT))
    m, z, mask = noise(1, S, N, MAIN.msa), noise(1, N, N, MAIN.pair, seed=8), chain_mask(1, S, N)
    x = normed(m, layer.layer_norm)
    a, b = (x @ part.weight.T + part.bias for part in (layer.linear_1, layer.linear_2))
    expected = z.clone()
    for i in range(N):
        for j in range(N):
            both = mask[0, :, i] * mask[0, :, j]
            outer = torch.einsum("s,sc,sd->cd", both, a[0, :, i], b[0, :, j]).flatten()
            expected[0, i, j] += (layer.linear_out.weight @ outer + layer.linear_out.bias) / (both.sum() + 1e-3)
    torch.testing.assert_close(layer(z, m, mask), expected)


# --- the structure module ---


ROTATIONS_IN_FP32 = {"rtol": 1e-5, "atol": 1e-5, "check_dtype": False}  # of ESMFold, in every precision


def esm_config() -> SimpleNamespace:
    return SimpleNamespace(
        sequence_dim=STRUCTURE.single, pairwise_dim=STRUCTURE.pair, ipa_dim=STRUCTURE.head,
        num_heads_ipa=STRUCTURE.heads, num_qk_points=STRUCTURE.query_points, num_v_points=STRUCTURE.value_points,
        resnet_dim=STRUCTURE.angle, num_resnet_blocks=STRUCTURE.angle_blocks, num_angles=7, num_transition_layers=1,
        num_blocks=STRUCTURE.iterations, trans_scale_factor=STRUCTURE.position_scale, dropout_rate=0.0,
        epsilon=1e-8, inf=1e5,
    )  # fmt: skip


def rotations(*shape: int, seed: int = 9) -> Tensor:
    return geometry.rotation_from_update(noise(*shape, 3, seed=seed))


def test_invariant_point_attention_is_that_of_esmfold() -> None:
    mine, theirs = randomised(InvariantPointAttention(STRUCTURE)), esm.EsmFoldInvariantPointAttention(esm_config())
    theirs.double().load_state_dict(mine.state_dict())
    s, z, mask = noise(2, N, STRUCTURE.single), noise(2, N, N, STRUCTURE.pair, seed=8), chain_mask(2, N)
    frames = Frames(rotations(2, N), noise(2, N, 3, seed=10))
    rigid = Rigid(Rotation(rot_mats=frames.rotation), frames.translation)
    torch.testing.assert_close(mine(s, z, frames, mask), theirs(s, z, rigid, mask), **ROTATIONS_IN_FP32)


def test_the_structure_module_is_that_of_esmfold() -> None:
    mine, theirs = randomised(StructureModule(STRUCTURE)), esm.EsmFoldStructureModule(esm_config()).double()
    theirs.load_state_dict(mine.state_dict())
    s, z, mask = noise(1, 21, STRUCTURE.single), noise(1, 21, 21, STRUCTURE.pair, seed=8), chain_mask(1, 21)
    aatype = torch.arange(21)[None]
    tables = ResidueTables(s)
    found = mine(s, z, aatype, mask, tables, OFF)
    expected = theirs.eval()({"single": s, "pair": z}, aatype, mask)
    torch.testing.assert_close(found.angles, expected["angles"], **ROTATIONS_IN_FP32)
    torch.testing.assert_close(found.raw_angles, expected["unnormalized_angles"], **ROTATIONS_IN_FP32)
    torch.testing.assert_close(found.single, expected["single"], **ROTATIONS_IN_FP32)
    torch.testing.assert_close(found.backbone.translation, expected["frames"][..., 4:], **ROTATIONS_IN_FP32)
    exists = tables.group_exists[aatype].bool() & (aatype < 20)[..., None]  # ESMFold's frames of unknown residues are 0
    groups = expected["sidechain_frames"][-1][exists]
    torch.testing.assert_close(found.groups.rotation[exists], groups[:, :3, :3], **ROTATIONS_IN_FP32)
    torch.testing.assert_close(found.groups.translation[exists], groups[:, :3, 3], **ROTATIONS_IN_FP32)
    torch.testing.assert_close(found.atoms, expected["positions"][-1], **ROTATIONS_IN_FP32)


def test_invariant_point_attention_does_not_change_when_all_frames_move() -> None:
    layer = randomised(InvariantPointAttention(STRUCTURE))
    s, z, mask = noise(1, N, STRUCTURE.single), noise(1, N, N, STRUCTURE.pair, seed=8), chain_mask(1, N)
    frames = Frames(rotations(1, N), noise(1, N, 3, seed=10))
    moved = Frames(rotations(1, 1, seed=11), noise(1, 1, 3, seed=12)).compose(frames)
    torch.testing.assert_close(layer(s, z, moved, mask), layer(s, z, frames, mask))


# --- torsion angles ---


def test_torsion_angles_of_built_atoms_are_those_they_were_built_from() -> None:
    residues = 40
    aatype = torch.arange(residues)[None] % 20
    sincos = torch.nn.functional.normalize(noise(1, residues, 7, 2), dim=-1)
    tables = ResidueTables(sincos)
    backbone = Frames(rotations(1, residues), 10 * noise(1, residues, 3, seed=10))
    groups = geometry.group_frames(tables, aatype, backbone, sincos)
    atoms = geometry.atoms37_of(tables, aatype, geometry.atoms14(tables, aatype, groups))
    exists = tables.exists37[aatype]
    found, mask = geometry.torsion_angles(tables, aatype, atoms, exists)
    known = torch.cat((torch.ones(1, residues, 1, dtype=torch.float64), tables.chi_mask[aatype]), -1)
    torch.testing.assert_close(mask[..., 2:], known)
    # the bonds of a residue's ideal groups are rounded to 0.001 angstrom
    torch.testing.assert_close(
        found[..., 2:, :] * known[..., None], sincos[..., 2:, :] * known[..., None], rtol=0, atol=0.02
    )
    true, group_mask = geometry.true_group_frames(tables, aatype, atoms, exists)
    torch.testing.assert_close(group_mask, tables.group_exists[aatype])
    difference = (true.rotation - groups.rotation).abs().amax((-1, -2)) * group_mask
    assert difference.max() < 0.02


def test_torsion_angles_of_a_crop_are_those_of_the_chain() -> None:
    aatype = torch.arange(12)[None]
    atoms = noise(1, 12, 37, 3)
    tables, mask = ResidueTables(atoms), torch.ones(1, 12, 37, dtype=torch.float64)
    whole = geometry.torsion_angles(tables, aatype, atoms, mask)
    assert not whole[1][0, 0, :2].any()
    previous = atoms[:, 4], mask[:, 4]
    for found, expected in zip(
        geometry.torsion_angles(tables, aatype[:, 5:9], atoms[:, 5:9], mask[:, 5:9], previous), whole, strict=True
    ):
        torch.testing.assert_close(found, expected[:, 5:9])
    start = geometry.torsion_angles(tables, aatype[:, :3], atoms[:, :3], mask[:, :3])
    torch.testing.assert_close(start[0], whole[0][:, :3])  # does not depend on the last residue


# --- whole passes ---


def test_a_new_network_is_an_identity_with_uniform_predictions() -> None:
    model = AlphaFold(SIZES, chooser(), SPLIT)
    model.initialise(generator())
    model.place(CPU, torch.float64)
    tensors = batch(passes=1)
    predictions = model(tensors)
    _, parts = all_losses(predictions, labels_of(tensors, model.tables), tensors, WEIGHTS, FEATURES.crop_size)
    assert parts["distogram"].item() == pytest.approx(math.log(64), rel=1e-6)
    assert parts["masked_msa"].item() == pytest.approx(math.log(23), rel=1e-6)
    assert parts["plddt"].item() == pytest.approx(math.log(50), rel=1e-6)
    torch.testing.assert_close(
        predictions.structure.backbone.rotation, torch.eye(3, dtype=torch.float64).expand(2, 1, 10, 3, 3)
    )
    block = EvoformerBlock(MAIN, False, chooser(), SPLIT).double()
    for layer in block.modules():
        if hasattr(layer, "initialise"):
            layer.initialise(generator())
    m, z = noise(1, S, N, MAIN.msa), noise(1, N, N, MAIN.pair)
    after = block(m, z, chain_mask(1, S, N), chain_mask(1, N, N), OFF._replace(active=True))
    torch.testing.assert_close(after, (m, z))


def test_only_the_last_pass_has_gradients_and_each_pass_counts() -> None:
    model, calls = network(), list[bool]()
    model.evoformer_stack.register_forward_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    results = [model(batch(passes)).distogram for passes in (1, 2, 3, 4)]
    assert calls == [True, *(False, True), *(False, False, True), *(False, False, False, True)]
    assert all(not torch.allclose(results[0], other) for other in results[1:])


def test_passes_without_gradients_have_dropout_in_training_and_none_in_evaluation() -> None:
    model, seeds = network(), [batch(2) | {"dropout_seed": torch.tensor(seed)} for seed in (1, 2)]
    first: list[Tensor] = []
    model.extra_msa_stack.register_forward_hook(lambda _, __, output: first.append(output[1].detach()))
    for tensors in seeds:
        model(tensors)
    assert not torch.allclose(first[0], first[2]), "the first pass has no dropout"
    assert not torch.allclose(first[0], first[1]), "both passes have one mask"
    model.eval()
    torch.testing.assert_close(model(seeds[0]).distogram, model(seeds[1]).distogram, rtol=0, atol=0)


def gradients(recompute: bool) -> list[Tensor]:
    model, tensors = network(recompute=recompute), batch(2)
    loss, _ = all_losses(model(tensors), labels_of(tensors, model.tables), tensors, WEIGHTS, FEATURES.crop_size)
    loss.backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def test_computing_activations_again_does_not_change_a_gradient() -> None:
    torch.testing.assert_close(gradients(recompute=True), gradients(recompute=False), rtol=1e-12, atol=1e-12)


def test_bf16_keeps_structure_and_heads_in_fp32() -> None:
    model, tensors = network(torch.bfloat16), batch(2)
    predictions = model(tensors)
    loss, _ = all_losses(predictions, labels_of(tensors, model.tables), tensors, WEIGHTS, FEATURES.crop_size)
    loss.backward()
    assert loss.dtype == predictions.structure.atoms.dtype == predictions.masked_msa.dtype == torch.float32
    assert {p.dtype for p in model.structure_module.parameters()} == {torch.float32}
    assert {p.dtype for p in model.evoformer_stack.parameters()} == {torch.bfloat16}
    assert torch.isfinite(loss)
