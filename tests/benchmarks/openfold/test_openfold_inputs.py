"""Embedders, templates and recycled results against float64 loops, and the order and the dropout of a block's parts."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.openfold import embedders, residues
from benchmarks.openfold.embedders import (
    ExtraEmbedder,
    InputEmbedder,
    PointwiseAttention,
    Recycled,
    RecyclingEmbedder,
    template_features,
)
from benchmarks.openfold.evoformer import EvoformerBlock, TemplateBlock
from benchmarks.openfold.geometry import ResidueTables
from benchmarks.openfold.layers import Linear, Masks
from tests.benchmarks.openfold.small_folds import (
    EXTRA,
    MAIN,
    SPLIT,
    STRUCTURE,
    TEMPLATE,
    batch,
    chooser,
    generator,
    network,
    randomised,
)

N, S, T = 6, 4, 3


def noise(*shape: int, seed: int = 5) -> Tensor:
    return torch.randn(shape, generator=generator(seed), dtype=torch.float64)


def column(layer: nn.Linear, index: int) -> Tensor:
    """Return the output for a one-hot input."""
    return layer.weight[:, index] + layer.bias


def test_pairs_begin_with_both_residues_and_their_clipped_offset_and_the_msa_with_the_sequence() -> None:
    layer = randomised(InputEmbedder(MAIN.msa, MAIN.pair))
    types, index = [0, 20, 7, 7, 19, 3], [4, 5, 9, 40, 41, 90]
    msa = noise(1, S, N, 49)
    m, z = layer(torch.tensor([types]), torch.tensor([index]), msa)
    for i in range(N):
        for j in range(N):
            offset = max(-32, min(32, index[i] - index[j])) + 32
            expected = column(layer.linear_tf_z_i, 1 + types[i]) + column(layer.linear_tf_z_j, 1 + types[j])
            torch.testing.assert_close(z[0, i, j], expected + column(layer.linear_relpos, offset))
        for s in range(S):
            expected = layer.linear_msa_m.weight @ msa[0, s, i] + layer.linear_msa_m.bias
            torch.testing.assert_close(m[0, s, i], expected + column(layer.linear_tf_m, 1 + types[i]))


def test_extra_sequences_have_a_token_and_two_numbers() -> None:
    layer = randomised(ExtraEmbedder(EXTRA.msa))
    token = torch.tensor([[[0, 22, 21], [5, 20, 1]]], dtype=torch.uint8)
    flag, value = noise(1, 2, 3), noise(1, 2, 3, seed=6)
    found = layer(token, flag, value)
    for e, n in np.ndindex(2, 3):
        features = torch.zeros(25, dtype=torch.float64)
        features[int(token[0, e, n])] = 1
        features[23:] = torch.stack((flag[0, e, n], value[0, e, n]))
        torch.testing.assert_close(found[0, e, n], layer.linear.weight @ features + layer.linear.bias)


def bin_of(distance: float, bins: int) -> int | None:
    """Return the bin of 1.25 angstrom of a distance; the first one begins at 3.25, and the last one does not end."""
    return min(int((distance - 3.25) // 1.25), bins - 1) if distance > 3.25 else None


def test_a_pass_begins_with_the_results_of_the_pass_before_it() -> None:
    layer = randomised(RecyclingEmbedder(MAIN.msa, MAIN.pair, chooser()))
    m, z = noise(1, S, N, MAIN.msa), noise(1, N, N, MAIN.pair, seed=6)
    previous = Recycled(noise(1, N, MAIN.msa, seed=7), noise(1, N, N, MAIN.pair, seed=8), 9 * noise(1, N, 3, seed=9))
    new_m, new_z = layer(m, z, previous)
    assert torch.equal(new_m[:, 1:], m[:, 1:])
    torch.testing.assert_close(new_m[:, 0], m[:, 0] + layer.layer_norm_m(previous.first_BNM))
    seen = set()
    for i in range(N):
        for j in range(N):
            number = bin_of(float((previous.beta_BN3[0, i] - previous.beta_BN3[0, j]).norm()), 15)
            seen.add(number)
            of_bin = layer.linear.bias if number is None else column(layer.linear, number)
            expected = z[0, i, j] + layer.layer_norm_z(previous.pair_BNNZ)[0, i, j] + of_bin
            torch.testing.assert_close(new_z[0, i, j], expected)
    assert {None, 14} < seen


def test_a_pair_attends_to_the_same_pair_of_the_templates_that_exist() -> None:
    layer = randomised(PointwiseAttention(MAIN.pair, TEMPLATE.pair, 3, 2))
    z, pairs = noise(2, N, N, MAIN.pair), noise(2, T, N, N, TEMPLATE.pair, seed=6)
    found = layer(z, pairs, torch.tensor([[1.0, 1.0, 0.0], [0.0, 0.0, 0.0]]))
    assert not found[1].any()
    for i, j in np.ndindex(N, N):
        q = (layer.mha.linear_q.weight @ z[0, i, j]).view(2, 3)
        k, v = (
            torch.stack([(part.weight @ pairs[0, t, i, j]).view(2, 3) for t in range(2)])
            for part in (layer.mha.linear_k, layer.mha.linear_v)
        )
        weight = torch.softmax(torch.einsum("hc,thc->th", q, k) / math.sqrt(3), 0)
        expected = layer.mha.linear_o(torch.einsum("th,thc->hc", weight, v).flatten())
        torch.testing.assert_close(found[0, i, j], expected)


# --- features of templates ---


def dihedral(points_43: Tensor) -> tuple[float, float]:
    """Return sine and cosine of the torsion of four points."""
    first, axis, last = points_43.diff(dim=0)
    a, b = torch.linalg.cross(first, axis), torch.linalg.cross(axis, last)
    sine = torch.linalg.cross(a, b) @ axis / axis.norm()
    return float(sine / (a.norm() * b.norm())), float(a @ b / (a.norm() * b.norm()))


def torsions(letters: str, atoms_N373: Tensor, mask_N37: Tensor, residue: int) -> list[tuple[float, float] | None]:
    """Return the seven torsions of a residue; None for unknown ones. Psi ends at the next residue's N, opposite O."""
    own, before = ("own", residue), ("before", residue - 1)
    chains = [
        [(before, "CA"), (before, "C"), (own, "N"), (own, "CA")],
        [(before, "C"), (own, "N"), (own, "CA"), (own, "C")],
        [(own, "N"), (own, "CA"), (own, "C"), (own, "O")],
    ]
    chis = residues.CHI_ATOMS[residues.RESTYPES.index(letters[residue])]
    chains += [[(own, atom) for atom in names] for names in chis]
    found: list[tuple[float, float] | None] = []
    for number, chain in enumerate(chains):
        rows = [(where[1], residues.ATOM_TYPES.index(atom)) for where, atom in chain]
        if any(row < 0 or not mask_N37[row, atom] for row, atom in rows):
            found.append(None)
            continue
        sine, cosine = dihedral(torch.stack([atoms_N373[row, atom] for row, atom in rows]))
        found.append((-sine, -cosine) if number == 2 else (sine, cosine))
    return found + [None] * (7 - len(found))


def test_features_of_templates_are_types_torsions_distances_and_masks() -> None:
    letters = "ADGKFE-R"
    length = len(letters)
    kinds = torch.tensor([[[21 if letter == "-" else residues.RESTYPES.index(letter) for letter in letters]]])
    atoms, mask = 6 * noise(1, 1, length, 37, 3), (noise(1, 1, length, 37, seed=6) > -2).double()
    mask[:, :, letters.index("-")] = 0
    mask[0, 0, 1, residues.CB] = mask[0, 0, 3, residues.N] = 0
    tensors = {
        "template_aatype": kinds, "template_all_atom_positions": atoms, "template_all_atom_mask": mask,
        "template_previous_positions": torch.zeros(1, 1, 37, 3), "template_previous_mask": torch.zeros(1, 1, 37),
    }  # fmt: skip
    found = template_features(tensors, ResidueTables(atoms), torch.float64)
    for n, letter in enumerate(letters):
        angles = found.angles_BTNF[0, 0, n]
        assert angles[:22].nonzero().flatten().tolist() == [int(kinds[0, 0, n])]
        expected = [None] * 7 if letter == "-" else torsions(letters, atoms[0, 0], mask[0, 0], n)
        assert angles[50:].tolist() == [float(angle is not None) for angle in expected]
        assert found.angle_mask_BTN[0, 0, n] == (expected[2] is not None)
        for number, angle in enumerate(expected):
            if angle is not None:
                turned = {"D": 4, "F": 4, "E": 5}.get(letter) == number  # half a turn gives the same residue
                assert angles[22 + 2 * number : 24 + 2 * number].tolist() == pytest.approx(angle, abs=1e-6)
                other = tuple(-value for value in angle) if turned else angle
                assert angles[36 + 2 * number : 38 + 2 * number].tolist() == pytest.approx(other, abs=1e-6)
    beta = [residues.CA if letter == "G" else residues.CB for letter in letters]
    backbone = mask[0, 0][:, [residues.N, residues.CA, residues.C]].prod(1)
    assert not backbone.all()
    for i, j in np.ndindex(length, length):
        features = torch.zeros(88, dtype=torch.float64)
        number = bin_of(float((atoms[0, 0, i, beta[i]] - atoms[0, 0, j, beta[j]]).norm()), 39)
        if number is not None:
            features[number] = 1
        features[39] = mask[0, 0, i, beta[i]] * mask[0, 0, j, beta[j]]
        features[40 + int(kinds[0, 0, j])] = features[62 + int(kinds[0, 0, i])] = features[87] = 1
        torch.testing.assert_close(found.pairs_BTNNF[0, 0, i, j], features * backbone[i] * backbone[j])


# --- the parts of blocks ---


def test_an_evoformer_block_updates_the_msa_first_and_then_the_pairs() -> None:
    for sizes, extra in ((MAIN, False), (EXTRA, True)):
        block = randomised(EvoformerBlock(sizes, extra, chooser(), SPLIT))
        off = Masks(torch.tensor(0), 0, active=False)
        m, z = noise(1, S, N, sizes.msa), noise(1, N, N, sizes.pair, seed=6)
        mask, pairs = torch.ones(1, S, N, dtype=torch.float64), torch.ones(1, N, N, dtype=torch.float64)
        found = block(m, z, mask, pairs, off)
        m = m + block.msa_att_row(m, z, mask)
        m = m + block.msa_att_col(m, mask)
        m = m + block.msa_transition(m)
        z = block.outer_product_mean(z, m, mask)
        for part in (block.tri_mul_out, block.tri_mul_in, block.tri_att_start, block.tri_att_end):
            z = part(z, pairs, off)
        torch.testing.assert_close(found, (m, z + block.pair_transition(z)))


def test_a_block_of_templates_begins_with_attention() -> None:
    block, off = randomised(TemplateBlock(TEMPLATE, chooser(), SPLIT)), Masks(torch.tensor(0), 0, active=False)
    z, pairs = noise(2, N, N, TEMPLATE.pair), torch.ones(2, N, N, dtype=torch.float64)
    (found,) = block(z, pairs, off)
    for part in (block.tri_att_start, block.tri_att_end, block.tri_mul_out, block.tri_mul_in):
        z = part(z, pairs, off)
    torch.testing.assert_close(found, z + block.pair_transition(z))


ROWS, COLUMNS = 1, 2
DROPPED = {"msa_att_row": ROWS, "tri_mul_out": ROWS, "tri_mul_in": ROWS, "tri_att_start": ROWS, "tri_att_end": COLUMNS}
"""Part of a block with dropout -> the dimension along which its mask is the same."""


def kept_of(template: bool, name: str) -> Tensor:
    """Return where a block keeps the update of a part, bool; all other parts of the block give 0."""
    block = TemplateBlock(TEMPLATE, chooser(), SPLIT) if template else EvoformerBlock(MAIN, False, chooser(), SPLIT)
    for layer in block.modules():
        if isinstance(layer, Linear):
            layer.initialise(generator())
    block.double()
    randomised(getattr(block, name))
    z = noise(2, N, N, TEMPLATE.pair if template else MAIN.pair)
    inputs, masks = [z], [torch.ones(2, N, N, dtype=torch.float64)]
    if not template:
        inputs, masks = [noise(2, N, N, MAIN.msa, seed=6), z], masks * 2
    number = 0 if name == "msa_att_row" else -1
    with torch.no_grad():
        update, dropped = (
            block(*inputs, *masks, Masks(torch.tensor(3), 16, active))[number] - inputs[number]
            for active in (False, True)
        )
    kept = dropped != 0
    expected = torch.where(kept, update / (0.85 if name == "msa_att_row" else 0.75), 0.0)
    torch.testing.assert_close(dropped, expected, rtol=1e-4, atol=1e-7)  # the probability is a number of 16 bits
    return kept


@pytest.mark.parametrize("template", [False, True])
def test_a_dropout_mask_is_shared_along_its_axis_and_differs_from_all_others(template: bool) -> None:
    patterns = []
    for name, dim in DROPPED.items():
        if template and name == "msa_att_row":
            continue
        kept = kept_of(template, name)
        first = kept.select(dim, 0)
        assert torch.equal(kept, first.unsqueeze(dim).expand_as(kept)), name
        assert 0.6 < first.double().mean() < 0.95, name
        assert not all(torch.equal(row, first[0, 0]) for row in first.flatten(0, 1)), name
        patterns.append(first.flatten()[:70].tolist())
    assert all(one != other for number, one in enumerate(patterns) for other in patterns[:number])


# --- passes ---


def test_a_pass_receives_the_first_sequence_the_pairs_and_the_atoms_of_the_pass_before_it() -> None:
    model, seen, results = network().eval(), list[Recycled](), list[tuple[Tensor, Tensor]]()
    model.recycling_embedder.register_forward_pre_hook(lambda _, given: seen.append(given[2]))
    model.evoformer_stack.register_forward_hook(lambda _, __, result: results.append(result))
    tensors = batch(2)
    tensors["aatype"][0, :2] = torch.tensor([residues.RESTYPES.index(letter) for letter in "GW"])
    structure = model({name: x[:, :1] if name.startswith(PASSES) else x for name, x in tensors.items()}).structure
    (m, z), start = results[0], seen[0]
    assert not any(tensor.any() for tensor in start)
    model(tensors)
    assert torch.equal(seen[2].first_BNM, m[:, 0])
    assert torch.equal(seen[2].pair_BNNZ, z)
    slots = [1 if kind == residues.RESTYPES.index("G") else 4 for kind in tensors["aatype"][0].tolist()]  # CA or CB
    expected = torch.stack([structure.atoms[0, n, slot] for n, slot in enumerate(slots)])
    assert torch.equal(seen[2].beta_BN3[0], expected)


PASSES = ("msa_", "extra_", "true_msa", "bert_mask")
"""Beginnings of the names of tensors with an axis of passes."""


def test_rows_of_templates_are_behind_the_msa_and_have_no_prediction() -> None:
    model, seen = network().eval(), list[tuple[Tensor, ...]]()
    model.evoformer_stack.register_forward_pre_hook(lambda _, given: seen.append(given))
    tensors = batch(1)
    tensors["template_all_atom_mask"][0, 1, 3, residues.O] = 0  # psi is unknown
    predictions = model(tensors)
    m, _, mask, *_ = seen[0]
    clusters, templates = tensors["msa_feat"].shape[2], tensors["template_aatype"].shape[1]
    assert m.shape[1] == mask.shape[1] == clusters + templates
    assert predictions.masked_msa.shape[1] == clusters
    assert (1 - mask[0]).nonzero().tolist() == [[clusters + 1, 3]]
    features = template_features(tensors, model.tables, torch.float64)
    rows = F.relu(model.template_angle_embedder.linear_1(features.angles_BTNF))
    torch.testing.assert_close(m[:, clusters:], model.template_angle_embedder.linear_2(rows))
    single = model.evoformer_stack.linear
    assert single.out_features == STRUCTURE.single
    assert embedders.LARGEST_OFFSET == 32
