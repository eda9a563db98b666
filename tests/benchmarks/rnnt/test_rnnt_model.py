"""RNN-T's network: sizes as the rules' reference has them, and equality with one of plain ``torch.nn`` layers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from benchmarks.rnnt import example
from benchmarks.rnnt.config import Facts, ModelConfig
from benchmarks.rnnt.model import IN_ORDER, PARTS, START, Rnnt, join_frames, training_flops
from common.distributed.layout import Layout
from common.mlperf.fixed import fixed_facts
from common.optim.adaptive import LAMB
from common.optim.learning_rate import constant
from common.optim.optimizer import ClipNorm, Optimizer, ParameterGroup
from common.step.train_step import apply_gradients
from tests.benchmarks.rnnt.transducer_oracle import PlainRnnt

CPU = torch.device("cpu")
FACTS = fixed_facts(Facts, "rnnt")
SMALL = fixed_facts(
    Facts, "rnnt", classes=11, encoder_width=12, prediction_width=8, joint_width=10, mel_filters=3, freq_mask_max=3,
)  # fmt: skip
FEATURES = SMALL.features


def real_network(features: int = 240, scale: float = 0.5, dtype: torch.dtype = torch.float32) -> Rnnt:
    """Return a network of the size in the rules."""
    config = ModelConfig(features=features, loss_scale=512.0)
    return Rnnt(FACTS, config, scale, torch.Generator().manual_seed(1), CPU, dtype)


def small_network(dtype: torch.dtype = torch.float64) -> Rnnt:
    config = ModelConfig(features=FEATURES, loss_scale=1.0)
    return Rnnt(SMALL, config, 2.0, torch.Generator().manual_seed(2), CPU, dtype)


def plain_like(network: Rnnt) -> PlainRnnt:
    """Return plain layers with the network's weights."""
    plain = PlainRnnt(FEATURES, SMALL.encoder_width, SMALL.prediction_width, SMALL.joint_width, SMALL.classes).double()
    weights = {name.removeprefix("joint."): weight for name, weight in network.state_dict().items()}
    plain.load_state_dict(weights)
    return plain


def small_batch(dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    """Return four utterances of odd, even, equal and minimum lengths, with noise in the padding of tokens."""
    generator = torch.Generator().manual_seed(3)
    lengths = torch.tensor([10, 7, 7, 1], dtype=torch.int32)
    features_TBF = torch.randn((12, 4, FEATURES), generator=generator, dtype=dtype)
    features_TBF[torch.arange(12)[:, None] >= lengths] = 0.0
    return {
        "features": features_TBF,
        "feature_lengths": lengths,
        "tokens": torch.randint(10, (4, 5), generator=generator, dtype=torch.int32),
        "token_lengths": torch.tensor([3, 5, 0, 1], dtype=torch.int32),
        "seed": torch.tensor([7]),
    }


@pytest.mark.parametrize(("features", "count"), [(240, 49_006_080), (256, 49_071_616)])
def test_the_network_has_the_reference_parameters(features, count):
    network = real_network(features)
    assert sum(parameter.numel() for parameter in network.parameters()) == count
    sizes = dict.fromkeys(PARTS, 0)
    for name, parameter in network.named_parameters():
        sizes[next(part for part in name.split(".") if part in sizes)] += parameter.numel()
    assert sizes == {
        "pre_rnn": 13_582_336 if features == 240 else 13_647_872,
        "post_rnn": 29_384_704,
        "pred_embed": 523_776,
        "dec_rnn": 4_202_496,
        "joint_enc": 524_800,
        "joint_pred": 262_656,
        "joint_net": 525_312,
    }


@pytest.mark.parametrize("scale", [0.5, 0.35])
def test_weights_start_as_the_reference_draws_them(scale):
    weights = dict(real_network(scale=scale).named_parameters())
    bound = {"pre_rnn": scale / 32, "post_rnn": scale / 32, "dec_rnn": scale / math.sqrt(512)}
    for name, weight in weights.items():
        part = name.split(".")[-2] if "joint" in name else name.split(".")[0]
        if part == "pred_embed":
            assert weight.mean().abs() < 0.01
            assert (weight.std() - 1).abs() < 0.01
            continue
        if part in bound:
            if "bias" in name:
                width = len(weight) // 4
                forget = weight[width : 2 * width]
                assert forget.unique().tolist() == pytest.approx([0.0 if "bias_hh" in name else scale])
                weight = torch.cat([weight[:width], weight[2 * width :]])
            limit = bound[part]
        else:
            limit = {"joint_enc": 1024, "joint_pred": 512, "joint_net": 512}[part] ** -0.5
        assert weight.abs().max() <= limit
        deviation = limit / math.sqrt(3)  # of a uniform distribution
        assert (weight.std() / deviation - 1).abs() < 5 / math.sqrt(weight.numel())
        assert weight.mean().abs() < 5 * deviation / math.sqrt(weight.numel())


def test_weights_of_padded_features_are_zero_and_all_others_as_without_padding():
    padded, own = dict(real_network(256).named_parameters()), dict(real_network(240).named_parameters())
    for name, weight in padded.items():
        if name == "pre_rnn.weight_ih_l0":
            assert not weight[:, 240:].any()
            weight = weight[:, :240]
        assert torch.equal(weight, own[name]), name


def test_updates_equal_those_of_a_network_without_padding():
    """After three updates, 16 columns of padding are still zero, and all other weights are those without padding."""
    facts = fixed_facts(
        Facts, "rnnt", classes=7, encoder_width=6, prediction_width=5, joint_width=4,
        encoder_dropout=0.0, prediction_dropout=0.0, joint_dropout=0.0,
    )  # fmt: skip
    generator, ends = torch.Generator().manual_seed(5), []
    features_STBF = torch.zeros((3, 5, 2, 256), dtype=torch.float64)
    features_STBF[..., :240] = torch.randn((3, 5, 2, 240), generator=generator, dtype=torch.float64)
    for features in (240, 256):
        config = ModelConfig(features=features, loss_scale=1.0)
        network = Rnnt(facts, config, 2.0, torch.Generator().manual_seed(2), CPU, torch.float64)
        group = ParameterGroup(network.in_order(), weight_decay=1e-3, trust_ratio=True)
        clip, rule = ClipNorm(1.0, "after_reduction"), LAMB(0.9, 0.999, 1e-9)
        optimizer = Optimizer([group], rule, constant(0.05), Layout(), grad_divisor=1.0, clip=clip)
        for features_TBF in features_STBF[..., :features]:
            tensors = {
                "features": features_TBF, "feature_lengths": torch.full((2,), 5, dtype=torch.int32),
                "tokens": torch.tensor([[1, 3], [5, 0]], dtype=torch.int32),
                "token_lengths": torch.full((2,), 2, dtype=torch.int32), "seed": torch.tensor([7]),
            }  # fmt: skip
            optimizer.begin()
            network.loss(tensors, None).mean().backward()
            optimizer.arm()
            assert not apply_gradients([optimizer], torch.tensor(0.0))
        ends.append(dict(network.named_parameters()))
    for name, weight in ends[1].items():
        if name == "pre_rnn.weight_ih_l0":
            assert not weight[:, 240:].any()
            weight = weight[:, :240]
        torch.testing.assert_close(weight, ends[0][name], rtol=1e-6, atol=1e-9)


def test_loss_and_gradients_equal_those_of_plain_layers():
    network, tensors = small_network().eval(), small_batch()
    plain = plain_like(network)
    loss_B = network.loss(tensors, None)
    expected_B = torch.stack(
        [
            plain(tensors["features"][:frames, row], tensors["tokens"][row, :count].tolist())
            for row, (frames, count) in enumerate(
                zip(tensors["feature_lengths"].tolist(), tensors["token_lengths"].tolist(), strict=True)
            )
        ]
    )
    torch.testing.assert_close(loss_B, expected_B, rtol=1e-12, atol=1e-12)
    loss_B.mean().backward()
    expected_B.mean().backward()
    wanted = dict(plain.named_parameters())
    for name, parameter in network.named_parameters():
        expected = wanted[name.removeprefix("joint.")].grad
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-10, atol=1e-13, msg=f"gradient of {name}")


def test_capacity_changes_nothing_unless_it_is_too_small():
    network, tensors = small_network().eval(), small_batch()
    whole_B = network.loss(tensors, None)
    used = 5 * 4 + 4 * 6 + 4 * 1 + 1 * 2
    torch.testing.assert_close(network.loss(tensors, used), whole_B, rtol=1e-14, atol=0)
    assert network.loss(tensors, used - 1).isinf().all()


def test_dropout_follows_the_seed_and_is_off_in_evaluation():
    network, tensors = small_network(), small_batch()
    first, again = network.loss(tensors, None), network.loss(tensors, None)
    other = network.loss({**tensors, "seed": tensors["seed"] + 1}, None)
    torch.testing.assert_close(first, again, rtol=0, atol=0)
    assert (first != other).all()
    network.eval()
    torch.testing.assert_close(
        network.loss(tensors, None), network.loss({**tensors, "seed": tensors["seed"] + 1}, None)
    )


def test_steps_of_decoding_equal_the_training_network():
    network, tensors = small_network().eval(), small_batch()
    plain = plain_like(network)
    f_SBJ, frames_B = network.encode(tensors["features"], tensors["feature_lengths"])
    assert frames_B.tolist() == [5, 4, 4, 1]
    state = network.initial_state(4)
    tokens_BN = torch.cat([torch.full((4, 1), START), tensors["tokens"].long()], 1)
    for step in range(4):
        g_BJ, state = network.predict_step(tokens_BN[:, step], state)
        found_BV = network.joint.logits(f_SBJ[0], g_BJ).log_softmax(1)
        for row in range(4):
            length = int(tensors["feature_lengths"][row])
            logits_SNV = plain.logits(tensors["features"][:length, row], tensors["tokens"][row].tolist())
            expected_V = logits_SNV[0, step].log_softmax(0)
            torch.testing.assert_close(found_BV[row], expected_V, rtol=1e-10, atol=1e-12)


def test_an_average_utterance_has_the_known_sizes():
    lengths = example.average_lengths(3, FACTS)
    assert lengths.frames_B.tolist() == [409] * 3  # 195,840 samples: 1,225 frames, three of them spliced to one
    assert example.AVERAGE_SAMPLES // FACTS.hop + 1 == 1225
    assert lengths.tokens_B.tolist() == [56] * 3
    assert training_flops(FACTS, 409, 56) == pytest.approx(108e9, rel=0.01)


def test_the_initial_loss_is_near_that_of_equal_classes():
    network = real_network(256).eval()
    lengths = example.average_lengths(1, FACTS)
    tensors = example.batch(lengths, (410, 56), 240, 256, FACTS.blank, torch.float32, CPU)
    equal = 261 * math.log(1024) - math.log(math.comb(260, 56))
    assert equal == pytest.approx(1676.47, abs=0.005)
    with torch.no_grad():
        loss = network.loss(tensors, None)
    assert float(loss) == pytest.approx(1680, rel=0.02)


def test_synthetic_lengths_have_librispeechs_statistics():
    lengths = example.real_lengths(20_000, FACTS, np.random.default_rng(4))
    joined = -(-lengths.frames_B // 2)
    assert lengths.frames_B.mean() == pytest.approx(414, rel=0.02)
    assert lengths.frames_B.max() <= 642
    assert 192 * (joined * (lengths.tokens_B + 1)).mean() == pytest.approx(2.45e6, rel=0.03)
    assert (np.diff(lengths.frames_B) <= 0).all()
    few = example.real_lengths(8, FACTS, np.random.default_rng(4))
    assert few.frames_B.mean() == pytest.approx(411, rel=0.03)  # also with few utterances
    assert few.tokens_B.mean() == pytest.approx(56, rel=0.02)


def test_parameters_are_in_the_order_of_the_forward_pass():
    network = small_network()
    names = list(network.in_order())
    assert sorted(names) == sorted(name for name, _ in network.named_parameters())
    parts = [next(part for part in IN_ORDER if name.startswith(f"{part}.")) for name in names]
    assert list(dict.fromkeys(parts)) == list(IN_ORDER)


@pytest.mark.parametrize("frames", [1, 4, 5])
def test_pairs_of_frames_are_joined_and_a_missing_one_is_zero(frames):
    x_TBH = torch.randn((frames, 3, 4), generator=torch.Generator().manual_seed(2))
    y_SBK = join_frames(x_TBH)
    assert y_SBK.shape == ((frames + 1) // 2, 3, 8)
    for frame in range(2 * len(y_SBK)):
        half = y_SBK[frame // 2, :, 4 * (frame % 2) : 4 * (frame % 2) + 4]
        assert torch.equal(half, x_TBH[frame] if frame < frames else torch.zeros(3, 4))
