"""Test FID's Inception against torchvision's network with other pooling."""

import pytest
import torch
import torch.nn.functional as F

from benchmarks.stable_diffusion.frozen.inception import Inception
from benchmarks.stable_diffusion.frozen.sizes import InceptionSizes
from common.errors import ConfigError
from common.nn.frozen import frozen_names
from tests.benchmarks.stable_diffusion.public_names import randomized

RESOLUTION = 75


@pytest.fixture(scope="module")
def network():
    found = Inception(1.0, RESOLUTION)
    randomized(found)
    return found


@pytest.fixture(scope="module")
def images():
    return torch.rand(2, 3, 40, 56, generator=torch.Generator().manual_seed(0))


def test_features_equal_pytorch_fids(network, images, monkeypatch):
    theirs = pytest.importorskip("pytorch_fid.inception")
    state = {**network.state_dict(), "fc.weight": torch.zeros(1008, 2048), "fc.bias": torch.zeros(1008)}
    monkeypatch.setattr(theirs, "load_state_dict_from_url", lambda *_, **__: state)
    model = theirs.InceptionV3([theirs.InceptionV3.BLOCK_INDEX_BY_DIM[2048]], resize_input=False).eval()
    ours = Inception(1.0, 80)
    ours.load_state_dict(network.state_dict())
    sized = torch.rand(2, 3, 80, 80, generator=torch.Generator().manual_seed(3))

    with torch.no_grad():
        expected = model(sized)[0].flatten(1)

    torch.testing.assert_close(ours.features(sized), expected, rtol=2e-4, atol=2e-5 * expected.abs().max().item())


def test_pictures_are_resized_bilinearly():
    """From 2 to 4 pixels, neighbours have weights 3/4 and 1/4, and the edges are repeated."""
    seen = []
    network = Inception(1 / 32, 4)
    network.forward = seen.append

    network.features(torch.tensor([[[[0.0, 1.0], [0.0, 1.0]]] * 3]))

    row = torch.tensor([0.0, 0.25, 0.75, 1.0]) * 2 - 1
    torch.testing.assert_close(seen[0], row.expand(1, 3, 4, 4))


def test_the_width_factor_scales_the_features(images):
    network = Inception(1 / 16, RESOLUTION)

    assert network.out == 128
    assert network.features(images).shape == (2, 128)
    assert frozen_names(network) == set(network.state_dict())
    assert not network.training


def test_a_width_factor_that_splits_channels_is_refused():
    with pytest.raises(ConfigError, match=r"inception\.width_factor=0\.3: a multiple of 1/32"):
        InceptionSizes(width_factor=0.3)


def test_pictures_of_any_size_and_dtype_are_accepted(images):
    network = Inception(1 / 16, RESOLUTION)

    features = network.features(F.interpolate(images, size=(150, 150), mode="nearest").half())

    assert features.dtype == torch.float32
    assert features.shape == (2, 128)
