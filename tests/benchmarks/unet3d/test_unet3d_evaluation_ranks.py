"""Test the evaluation on several ranks: the assignment of volumes and windows, and equal counts for all layouts."""

import pytest
import torch

from benchmarks.unet3d import evaluate
from benchmarks.unet3d.evaluation_volumes import assign_volumes, assign_windows, choose_share, shares_to_try
from benchmarks.unet3d.model import UNet3D, UNet3DArchitecture
from benchmarks.unet3d.sliding_window import SlidingWindow
from benchmarks.unet3d.volumes import VolumeEntry
from common.distributed.layout import Layout
from common.distributed.spatial.split import VolumeSplit
from tests.benchmarks.unet3d import evaluation_oracle as oracle
from tests.benchmarks.unet3d.evaluation_oracle import Pattern, counts_of, evaluation_of, expected_counts
from tests.gloo_ranks import on_ranks

LAYOUTS = {
    2: [({"dp": 2}, None), ({"dp": 2}, 1), ({"dp": 2}, 2), ({"cp": 2}, None)],
    4: [({"dp": 4}, 1), ({"dp": 4}, 2), ({"dp": 4}, 4), ({"cp": 4}, None), ({"dp": 2, "cp": 2}, 2)],
}


def run_rank(rank, ranks, folder):
    """Evaluate on every layout of ``ranks`` ranks. A share replaces the one that would be chosen."""
    found, all_shares = [], evaluate.shares_to_try
    for sizes, share in LAYOUTS[ranks]:
        layout = Layout(sizes, rank)
        model = Pattern(first=layout.index("cp") * 16 // layout.size("cp"), mean=False)
        evaluate.shares_to_try = all_shares if share is None else lambda ranks, share=share: (share,)
        evaluation = evaluation_of(model, layout)
        found.append([counts_of(evaluation, model) for _ in range(2)])
    return found


@pytest.mark.parametrize("ranks", LAYOUTS)
def test_all_layouts_give_the_counts_of_one_rank(ranks, tmp_path):
    expected = expected_counts(mean=False)
    for rank, all_found in enumerate(on_ranks(run_rank, ranks, tmp_path)):
        for layout, found in zip(LAYOUTS[ranks], all_found, strict=True):
            assert found == [expected, expected], f"rank {rank} of {layout}"


FLAT = SlidingWindow((64, 32, 32), 0.5, oracle.PADDING_VALUE)  # windows as small as the network takes
FLAT_CASES = [
    VolumeEntry(f"case_{number:05d}", shape, "eval") for number, shape in enumerate([(64, 32, 50), (97, 35, 32)])
]


def counts_of_the_network(layout):
    """Return the counts of a 3D U-Net with few channels, in float64."""
    architecture = UNet3DArchitecture(classes=3, filters=(2, 2, 2, 2, 2), norm_epsilon=1e-5)
    drawn = torch.Generator().manual_seed(0)
    split = VolumeSplit.from_layout(layout)
    model = UNet3D(architecture, generator=drawn, dtype=torch.float64, split=split)
    evaluation = evaluation_of(model, layout, batch=2, window=FLAT, cases=FLAT_CASES, dtype=torch.float64)
    return counts_of(evaluation, model)


def run_network(rank, ranks, folder):
    return counts_of_the_network(Layout({"cp": ranks}, rank))


def test_slabs_give_the_counts_of_the_whole_network(tmp_path):
    expected = counts_of_the_network(Layout())
    assert sum(row[1] > 0 for counts in expected.values() for row in counts) > len(expected)  # several classes
    assert on_ranks(run_network, 2, tmp_path) == [expected, expected]


@pytest.mark.parametrize(("groups", "assigned"), [(1, [[1, 3, 0, 2]]), (2, [[1, 2], [3, 0]]), (3, [[1], [3], [0, 2]])])
def test_the_longest_volumes_are_assigned_first(groups, assigned):
    assert assign_volumes([4, 9, 2, 8], groups) == assigned


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_the_windows_of_a_group_are_assigned_once_and_evenly(ranks):
    windows = [1, 12, 5, 2]
    parts = [assign_windows(windows, ranks, rank) for rank in range(ranks)]
    for volume, count in enumerate(windows):
        assert sorted(window for part in parts for window in part[volume]) == list(range(count))
    loads = [sum(len(windows) for windows in part) for part in parts]
    assert max(loads) - min(loads) <= 1


@pytest.mark.parametrize(
    ("windows", "ranks", "batch", "share"),
    [
        ([4] * 42, 1, 4, 1),
        ([4] * 16, 8, 4, 1),  # two volumes per rank, without idle ranks
        ([64, 4, 4, 4], 2, 4, 2),  # 64 + 12 windows: 38 each, in ten batches, beats 64
        ([12, 12], 8, 1, 4),  # 3 windows each, as with all 8 ranks, which would sum twice
        ([144], 8, 4, 8),
    ],
)
def test_the_fastest_share_is_chosen(windows, ranks, batch, share):
    assert choose_share(windows, ranks, batch, shares_to_try(ranks)) == share


def test_shares_divide_the_ranks():
    assert shares_to_try(12) == (1, 2, 4)
    assert shares_to_try(96) == (1, 2, 4, 8)
