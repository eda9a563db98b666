"""What the benchmark of 3D U-Net's operations measures, and how it adds up."""

import pytest
import torch

from benchmarks.unet3d.ops import augment, dice_cross_entropy, instance_norm, output_convolution, upsample, window_sums
from benchmarks.unet3d.ops.bench import entries, sweeps
from benchmarks.unet3d.ops.bench_layers import SIZE, layers, norms
from common.ops import local_convolution
from common.ops.bench import cases
from tests.references import run_references

OPERATIONS = (instance_norm, upsample, output_convolution, dice_cross_entropy, augment, local_convolution)


@pytest.fixture
def without_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors have shapes only, and the references stand in for the kernels, which cannot run on them."""
    monkeypatch.setattr(cases, "DEVICE", "meta")
    run_references(
        monkeypatch,
        instance_norm.INSTANCE_NORM,
        upsample.UPSAMPLE,
        output_convolution.OUTPUT_CONVOLUTION,
        dice_cross_entropy.DICE_CROSS_ENTROPY,
        augment.AUGMENT,
        window_sums.ADD_WINDOW,
        window_sums.COUNT_CLASSES,
        local_convolution.LOCAL_CONVOLUTION,
    )


def test_layers_are_those_of_the_network() -> None:
    """28 convolutions of 954.6 GFLOP for a crop, a norm behind each of the 22 of 3x3x3; the specification's count."""
    assert len(layers()) == 28
    assert sum(layer.flops for layer in layers()) == pytest.approx(954.6e9, rel=1e-4)
    assert sum(norms().values()) == 22
    assert norms()[32, SIZE, 1] == 3
    assert {key: count for key, count in norms().items() if key[2] == 2} == {
        (32, 128, 2): 1, (64, 64, 2): 1, (128, 32, 2): 1, (256, 16, 2): 1, (320, 8, 2): 1
    }  # fmt: skip


def test_a_step_runs_every_layer_once() -> None:
    calls: dict[str, int] = {}
    for entry in entries():
        kind = entry.name.split()[0]
        calls[kind] = calls.get(kind, 0) + entry.calls
    assert calls == {
        "conv": 22,
        "upsample": 5,
        "output_convolution": 1,
        "norm": 22,
        "loss": 1,
        "augmentation": 0,
        "windows": 0,
    }


def test_names_are_given_once() -> None:
    names = [entry.name for entry in entries()]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("batch", [1, 7])
@pytest.mark.usefixtures("without_memory")
def test_every_pass_of_every_entry_runs(batch: int) -> None:
    for entry in entries():
        passes = entry.build(batch, torch.bfloat16)
        assert passes[0].name == "forward", entry.name
        if not entry.name.endswith("compiled"):
            for each in passes:
                each.run()


@pytest.mark.usefixtures("without_memory")
def test_a_step_has_the_flops_of_the_network() -> None:
    """2.860 TFLOP to train on a crop: forward, and twice as many backward but for the gradient of the image."""
    passes = [each for entry in entries() if entry.calls for each in entry.build(1, torch.bfloat16)]
    assert sum(each.flops for each in passes) == pytest.approx(2.860e12, rel=2e-4)


@pytest.mark.usefixtures("without_memory")
def test_a_sweep_tries_tiles_of_its_table_in_a_pass_of_its_case() -> None:
    pytest.importorskip("triton")
    for name, sweep in sweeps().items():
        passes = sweep.build(torch.bfloat16)
        assert ("forward" not in passes[int(sweep.backward)].name) == sweep.backward, name
        tile = sweep.table[sweep.key]
        assert [tuple(type(tile)(*choice)) for choice in sweep.choices] == list(sweep.choices), name
