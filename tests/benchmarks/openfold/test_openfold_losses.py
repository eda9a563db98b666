"""The losses of OpenFold and the lDDT against plain loops, and their symmetries."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from benchmarks.openfold import geometry, residues
from benchmarks.openfold.evaluate import MeanLddt, chain_lddt
from benchmarks.openfold.geometry import Frames, ResidueTables
from benchmarks.openfold.labels import Labels, labels_of
from benchmarks.openfold.losses import (
    all_losses,
    alpha_atoms,
    backbone_fape,
    chi_loss,
    confidence_loss,
    distogram_loss,
    fape,
    lddt_sums,
    masked_msa_loss,
    other_naming_is_better,
    sidechain_fape,
)
from benchmarks.openfold.residues import CA
from benchmarks.openfold.structure import Structure
from common.contract.evaluation import Predictions
from tests.benchmarks.openfold.small_folds import FEATURES, WEIGHTS, batch, generator, network

N, L = 10, 2


def noise(*shape: int, seed: int = 5) -> Tensor:
    return torch.randn(shape, generator=generator(seed), dtype=torch.float64)


def some(*shape: int, seed: int = 6) -> Tensor:
    return (torch.rand(shape, generator=generator(seed)) < 0.8).to(torch.float64)


def frames_of(*shape: int, seed: int) -> Frames:
    return Frames(geometry.rotation_from_update(noise(*shape, 3, seed=seed)), 5 * noise(*shape, 3, seed=seed + 1))


def tables() -> ResidueTables:
    return ResidueTables(torch.empty(0, dtype=torch.float64))


def built(seed: int = 20) -> tuple[Tensor, Structure]:
    """Residue types (1, N), with all ambiguous ones, and a structure with ideal groups."""
    letters = "DEFYAGRWDK"
    aatype = torch.tensor([[residues.RESTYPES.index(letter) for letter in letters]])
    angles = torch.nn.functional.normalize(noise(L, 1, N, 7, 2, seed=seed), dim=-1)
    backbone = frames_of(L, 1, N, seed=seed + 1)
    last = Frames(backbone.rotation[-1], backbone.translation[-1])
    groups = geometry.group_frames(tables(), aatype, last, angles[-1])
    atoms = geometry.atoms14(tables(), aatype, groups)
    return aatype, Structure(backbone, groups, 1.3 * angles, angles, atoms, noise(1, N, 4))


def truth(aatype: Tensor, structure: Structure) -> dict[str, Tensor]:
    """Return the part of a batch that has the structure as its true one."""
    return {
        "aatype": aatype,
        "all_atom_positions": geometry.atoms37_of(tables(), aatype, structure.atoms),
        "all_atom_mask": tables().exists37[aatype],
    }


def labels() -> tuple[Structure, Labels]:
    """Return a structure, and the labels of another one of the same residues, some of whose atoms are unknown."""
    aatype, predicted = built()
    tensors = truth(aatype, built(seed=40)[1])
    tensors["all_atom_mask"] = tensors["all_atom_mask"] * some(1, N, 37)
    return predicted, labels_of(tensors, tables())


def mean_error(frames, points, true_frames, true_points, frame_mask, point_mask, clamp) -> float:
    total = 0.0
    for f in range(len(frame_mask)):
        for p in range(len(point_mask)):
            local = frames.rotation[f].T @ (points[p] - frames.translation[f])
            true = true_frames.rotation[f].T @ (true_points[p] - true_frames.translation[f])
            distance = math.sqrt(float((local - true).square().sum()) + 1e-4)
            total += min(distance, clamp) / 10 * float(frame_mask[f] * point_mask[p])
    return total / (1e-4 + float(frame_mask.sum())) / (1e-4 + float(point_mask.sum()))


@pytest.mark.parametrize("clamp", [10.0, None])
def test_fape_is_a_mean_over_frames_and_points(clamp: float | None) -> None:
    arguments = (frames_of(4, seed=1), 9 * noise(6, 3), frames_of(4, seed=3), 9 * noise(6, 3, seed=7), some(4), some(6))
    assert fape(*arguments, clamp).item() == pytest.approx(mean_error(*arguments, clamp or math.inf))


def test_fape_does_not_change_when_the_prediction_moves() -> None:
    frames, points = frames_of(4, seed=1), 9 * noise(6, 3)
    motion = frames_of(1, seed=11)
    truths = frames_of(4, seed=3), 9 * noise(6, 3, seed=7), some(4), some(6)
    still = fape(frames, points, *truths, 10.0)
    torch.testing.assert_close(fape(motion.compose(frames), motion.apply(points), *truths, 10.0), still)


@pytest.mark.parametrize("clamped", [0.0, 0.3, 1.0])
def test_backbone_fape_mixes_clamped_and_unclamped_errors_of_all_iterations(clamped: float) -> None:
    predicted, known = labels()
    true = Frames(known.groups.rotation[0, :, 0], known.groups.translation[0, :, 0])
    mask, expected = known.group_mask[0, :, 0], 0.0
    for iteration in range(L):
        frames = Frames(predicted.backbone.rotation[iteration, 0], predicted.backbone.translation[iteration, 0])
        arguments = (frames, frames.translation, true, true.translation, mask, mask)
        expected += clamped * mean_error(*arguments, 10.0) / L + (1 - clamped) * mean_error(*arguments, math.inf) / L
    found = backbone_fape(predicted.backbone, known, torch.tensor([clamped], dtype=torch.float64))
    assert found.item() == pytest.approx(expected)


def swapped(atoms_373: Tensor, letter: str) -> Tensor:
    """Return a residue's atoms with both names of equivalent atoms exchanged."""
    changed = atoms_373.clone()
    for one, other in residues.AMBIGUOUS.get(letter, {}).items():
        first, second = residues.ATOM_TYPES.index(one), residues.ATOM_TYPES.index(other)
        changed[first], changed[second] = atoms_373[second], atoms_373[first]
    return changed


def test_a_true_structure_with_other_names_of_equivalent_atoms_has_no_sidechain_error() -> None:
    aatype, predicted = built()
    tensors = truth(aatype, predicted)
    letters = [residues.RESTYPES[kind] for kind in aatype[0].tolist()]
    atoms = tensors["all_atom_positions"][0]
    renamed = torch.stack([swapped(own, letter) for own, letter in zip(atoms, letters, strict=True)])
    known = labels_of(tensors | {"all_atom_positions": renamed[None]}, tables())
    better = other_naming_is_better(predicted.atoms, known)
    assert better[0].tolist() == [float(letter in residues.AMBIGUOUS) for letter in letters]
    own = sidechain_fape(predicted, labels_of(tensors, tables())).item()
    assert own == pytest.approx(0.001, abs=2e-3), "the epsilon below the root, and rounded bonds"
    assert sidechain_fape(predicted, known).item() == pytest.approx(own, abs=2e-3)


def test_sidechain_fape_is_a_mean_over_groups_and_atoms_in_the_better_naming() -> None:
    predicted, known = labels()
    other = other_naming_is_better(predicted.atoms, known)[0].bool()
    assert other.any()
    rotation, atoms, mask = known.groups.rotation[0].clone(), known.atoms[0].clone(), known.atom_mask[0].clone()
    rotation[other], atoms[other] = known.other_groups.rotation[0][other], known.other_atoms[0][other]
    mask[other] = known.other_atom_mask[0][other]
    frames = Frames(predicted.groups.rotation[0].flatten(0, 1), predicted.groups.translation[0].flatten(0, 1))
    true = Frames(rotation.flatten(0, 1), known.groups.translation[0].flatten(0, 1))
    points = (predicted.atoms[0].flatten(0, 1), true, atoms.flatten(0, 1))
    group_mask = known.group_mask[0].flatten()
    keep, seen = group_mask.bool(), mask.flatten().bool()
    expected = mean_error(
        Frames(frames.rotation[keep], frames.translation[keep]), points[0][seen],
        Frames(true.rotation[keep], true.translation[keep]), points[2][seen], group_mask[keep], mask.flatten()[seen],
        10.0,
    )  # fmt: skip
    assert sidechain_fape(predicted, known).item() == pytest.approx(expected)


def test_the_better_naming_has_the_smaller_error_of_distances() -> None:
    predicted, known = labels()
    found = other_naming_is_better(predicted.atoms, known)[0]
    for residue in range(N):
        errors = []
        for atoms in (known.atoms[0], known.other_atoms[0]):
            total = 0.0
            for slot in range(14):
                for neighbour in range(N):
                    for fixed in range(14):
                        weight = known.atom_mask[0, residue, slot] * known.ambiguous[0, residue, slot]
                        weight = (
                            weight * known.atom_mask[0, neighbour, fixed] * (1 - known.ambiguous[0, neighbour, fixed])
                        )
                        if weight:
                            true = (atoms[residue, slot] - known.atoms[0, neighbour, fixed]).norm()
                            own = (predicted.atoms[0, residue, slot] - predicted.atoms[0, neighbour, fixed]).norm()
                            total += float((own - true).abs())
            errors.append(total)
        assert bool(found[residue]) == (errors[1] < errors[0]), f"residue {residue}: {errors}"


def test_a_resolved_unknown_residue_counts_by_its_backbone_and_its_predicted_atoms_are_at_the_origin() -> None:
    aatype, predicted = built()
    aatype[0, 3] = 20
    tensors = truth(*built())
    known = labels_of(tensors | {"aatype": aatype}, tables())
    assert known.group_mask[0, 3].tolist() == [1, 0, 0, 1, 0, 0, 0, 0]
    assert known.alpha_mask[0, 3] == 1
    atoms = geometry.atoms14(tables(), aatype, predicted.groups)
    assert alpha_atoms(predicted._replace(atoms=atoms))[0, 3].tolist() == [0, 0, 0]


def test_chi_loss_takes_the_nearer_of_periodic_angles_and_pulls_lengths_to_1() -> None:
    predicted, known = labels()
    chain = some(1, N, seed=8)
    total, counted, lengths = 0.0, 0.0, 0.0
    for iteration in range(L):
        for residue in range(N):
            for chi in range(4):
                angle, true = predicted.angles[iteration, 0, residue, 3 + chi], known.chi[0, residue, chi]
                error = float((angle - true).square().sum())
                if known.chi_sign[0, residue, chi] < 0:
                    error = min(error, float((angle + true).square().sum()))
                total += error * float(known.chi_mask[0, residue, chi])
                counted += float(known.chi_mask[0, residue, chi])
            raw = predicted.raw_angles[iteration, 0, residue]
            lengths += float(chain[0, residue]) * sum(abs(math.sqrt(float(v @ v) + 1e-6) - 1) for v in raw)
    norm = lengths / (1e-4 + 7 * L * float(chain.sum()))
    expected = 0.5 * total / (1e-4 + counted) + 0.01 * norm
    assert chi_loss(predicted, known, chain).item() == pytest.approx(expected)
    assert (known.chi_sign < 0).any()


def test_distogram_loss_counts_bins_of_0_3125_angstrom() -> None:
    _, known = labels()
    logits = noise(1, N, N, 64)
    total, counted = 0.0, 0.0
    for i in range(N):
        for j in range(N):
            distance = float((known.beta[0, i] - known.beta[0, j]).norm())
            bin_number = min(max(math.ceil((distance - 2.3125) / 0.3125), 0), 63)
            weight = float(known.beta_mask[0, i] * known.beta_mask[0, j])
            total -= weight * float(logits[0, i, j].log_softmax(-1)[bin_number])
            counted += weight
    assert distogram_loss(logits, known).item() == pytest.approx(total / (1e-6 + counted))


def test_masked_msa_loss_counts_masked_positions() -> None:
    logits, mask = noise(1, 3, N, 23), 1 - some(1, 3, N)
    true = torch.randint(23, (1, 3, N), generator=generator(), dtype=torch.uint8)
    total = 0.0
    for s, n in mask[0].nonzero().tolist():
        total -= float(logits[0, s, n].log_softmax(-1)[int(true[0, s, n])])
    assert masked_msa_loss(logits, true, mask).item() == pytest.approx(total / float(mask.sum()))


def plain_lddt(points: Tensor, true: Tensor, mask: Tensor) -> list[tuple[float, int]]:
    """Kept and counted distances of each residue."""
    sums = []
    for i in range(len(points)):
        kept, counted = 0.0, 0
        for j in range(len(points)):
            true_distance, distance = float((true[i] - true[j]).norm()), float((points[i] - points[j]).norm())
            if i != j and mask[i] and mask[j] and true_distance < 15:
                counted += 1
                kept += sum(abs(true_distance - distance) < threshold for threshold in (0.5, 1, 2, 4)) / 4
        sums.append((kept, counted))
    return sums


def test_lddt_counts_near_pairs_of_known_residues() -> None:
    true, mask = 5 * noise(1, N, 3), some(1, N)
    points = true + noise(1, N, 3, seed=9)
    expected = plain_lddt(points[0], true[0], mask[0])
    kept, counted = lddt_sums(points, true, mask)
    assert [*zip(kept[0].tolist(), counted[0].tolist(), strict=True)] == [pytest.approx(pair) for pair in expected]
    tensors = {"all_atom_positions": torch.zeros(1, N, 37, 3), "all_atom_mask": torch.zeros(1, N, 37)}
    tensors["all_atom_positions"] = tensors["all_atom_positions"].double()
    tensors["all_atom_positions"][:, :, CA], tensors["all_atom_mask"][:, :, CA] = true, mask.float()
    score = sum(kept for kept, _ in expected) / sum(counted for _, counted in expected)
    assert chain_lddt(points, tensors).item() == pytest.approx(score)
    assert chain_lddt(true, tensors).item() == pytest.approx(1.0)


@pytest.mark.parametrize(("resolution", "counts"), [(0.0, False), (0.1, True), (3.0, True), (3.1, False)])
def test_confidence_loss_has_bins_of_the_lddt_and_skips_low_resolutions(resolution: float, counts: bool) -> None:
    _, known = labels()
    logits, points = noise(1, N, 50), known.alpha + noise(1, N, 3)
    total = 0.0
    for n, (kept, counted) in enumerate(plain_lddt(points[0], known.alpha[0], known.alpha_mask[0])):
        score = kept / counted if counted else 1.0
        total -= float(known.alpha_mask[0, n] * logits[0, n].log_softmax(-1)[min(int(50 * score), 49)])
    expected = total / float(known.alpha_mask.sum()) if counts else 0.0
    found = confidence_loss(logits, points, known, torch.tensor([resolution], dtype=torch.float64))
    assert found.item() == pytest.approx(expected)


def test_the_loss_is_weighted_and_grows_with_the_root_of_the_length() -> None:
    model, tensors = network().eval(), batch(1)
    predictions, known = model(tensors), labels_of(tensors, model.tables)

    def total(length: float) -> tuple[float, dict[str, Tensor]]:
        chain = tensors | {"seq_length": torch.tensor([length])}
        loss, parts = all_losses(predictions, known, chain, WEIGHTS, FEATURES.crop_size)
        return loss.item(), parts

    loss, parts = total(4.0)
    factors = {"fape": 1.0, "supervised_chi": 1.0, "distogram": 0.3, "masked_msa": 2.0, "plddt": 0.01}
    assert loss == pytest.approx(2 * sum(factors[name] * part.item() for name, part in parts.items()))
    assert total(500.0)[0] == pytest.approx(loss / 2 * math.sqrt(FEATURES.crop_size)), "at most the crop's length"
    predictions = predictions._replace(distogram=torch.full_like(predictions.distogram, math.nan))
    assert total(4.0)[0] == pytest.approx(loss - 2 * 0.3 * parts["distogram"].item()), "a part that is NaN counts as 0"


def test_a_set_that_was_not_evaluated_completely_has_no_score() -> None:
    values = {"lddt": 1.5, "samples": 3, "expected": 3}
    assert MeanLddt().score(Predictions(values)) == {"lddt_ca": 0.5, "eval_samples": 3}
    with pytest.raises(RuntimeError, match="3 of 4 chains"):
        MeanLddt().score(Predictions(values | {"expected": 4}))
