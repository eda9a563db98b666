"""Test CLIP's two towers against Transformers."""

import pytest
import torch
from transformers import CLIPTextConfig, CLIPTextModelWithProjection, CLIPVisionConfig, CLIPVisionModelWithProjection

from benchmarks.stable_diffusion.frozen.clip import TextTower, VisionTower
from benchmarks.stable_diffusion.frozen.sizes import TextSizes, VisionSizes
from common.errors import ConfigError
from common.nn.frozen import frozen_names
from tests.benchmarks.stable_diffusion.public_names import randomized, text_of_transformers, vision_of_transformers

TEXT = TextSizes(vocabulary=600, context=11, width=24, layers=3, heads=3, mlp=40, embedding=16)
VISION = VisionSizes(resolution=24, patch=8, width=24, layers=3, heads=3, mlp=40, embedding=16)


@pytest.fixture(scope="module")
def tokens():
    rows = torch.randint(1, 598, (4, 11), generator=torch.Generator().manual_seed(0))
    rows[:, 0] = 598
    for row, end in zip(rows, (3, 10, 1, 6), strict=True):
        row[end] = 599
        row[end + 1 :] = 0
    return rows


@pytest.fixture(scope="module")
def text():
    tower = TextTower(TEXT).double()
    randomized(tower)
    return tower


def test_the_published_towers_have_their_number_of_parameters():
    def count(module):
        return sum(parameter.numel() for parameter in module.parameters())

    with torch.device("meta"):
        text, vision = TextTower(TextSizes()), VisionTower(VisionSizes())
    used = count(text) - count(text.transformer.resblocks[-1]) - text.text_projection.numel()
    temperature = 1  # only training needs it

    assert (used, count(text), count(vision)) == (340_387_840, 354_032_640, 632_076_800)
    assert count(text) + count(vision) + temperature == 986_109_441


def test_the_text_tower_equals_transformers(text, tokens):
    config = CLIPTextConfig(
        vocab_size=600, hidden_size=24, intermediate_size=40, projection_dim=16, num_hidden_layers=3,
        num_attention_heads=3, max_position_embeddings=11, hidden_act="gelu", bos_token_id=598, eos_token_id=599,
        pad_token_id=0,
    )  # fmt: skip
    theirs = CLIPTextModelWithProjection(config).double().eval()
    theirs.load_state_dict(text_of_transformers(text.state_dict()))

    with torch.no_grad():
        whole = theirs(tokens, output_hidden_states=True)
        penultimate = theirs.text_model.final_layer_norm(whole.hidden_states[-2])

    torch.testing.assert_close(text.encode(tokens), penultimate, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(text.project(tokens), whole.text_embeds, rtol=1e-10, atol=1e-10)
    assert (text.encode(tokens) - whole.last_hidden_state).abs().max() > 0.1


def test_tokens_do_not_depend_on_later_tokens(text, tokens):
    changed = tokens.clone()
    changed[0, 7] = 5

    before, after = text.encode(tokens), text.encode(changed)

    torch.testing.assert_close(before[0, :7], after[0, :7])
    assert (before[0, 7:] - after[0, 7:]).abs().max() > 1e-3
    torch.testing.assert_close(text.project(tokens), text.project(changed))  # its end is at 3


def test_the_vision_tower_equals_transformers():
    tower = VisionTower(VISION).double()
    randomized(tower)
    config = CLIPVisionConfig(
        hidden_size=24, intermediate_size=40, projection_dim=16, num_hidden_layers=3, num_attention_heads=3,
        image_size=24, patch_size=8, hidden_act="gelu",
    )  # fmt: skip
    theirs = CLIPVisionModelWithProjection(config).double().eval()
    theirs.load_state_dict(vision_of_transformers(tower.state_dict()))
    pixels = torch.randn(3, 3, 24, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(2))

    with torch.no_grad():
        expected = theirs(pixels).image_embeds

    torch.testing.assert_close(tower.project(pixels), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_text_tower_computes_in_its_dtype(text, tokens, dtype):
    tower = TextTower(TEXT).to(dtype)
    tower.load_state_dict(text.state_dict())

    encoded = tower.encode(tokens)

    assert encoded.dtype == dtype
    bound = {torch.float32: 1e-5, torch.bfloat16: 0.03}[dtype]
    expected = text.encode(tokens)
    assert (encoded.double() - expected).square().mean().sqrt() / expected.std() < bound


def test_the_towers_are_frozen(text):
    tower = VisionTower(VISION)

    assert frozen_names(text) == set(text.state_dict())
    assert frozen_names(tower) == set(tower.state_dict())
    assert not tower.training
    assert not text.encode(torch.zeros(1, 3, dtype=torch.int64)).requires_grad


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TextSizes(width=30, heads=4), r"text\.width=30: a multiple of text\.heads=4"),
        (lambda: VisionSizes(width=30, heads=4), r"vision\.width=30: a multiple of vision\.heads=4"),
        (lambda: VisionSizes(resolution=30, patch=8), r"vision\.resolution=30: a multiple of vision\.patch=8"),
    ],
)
def test_sizes_that_do_not_divide_are_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()
