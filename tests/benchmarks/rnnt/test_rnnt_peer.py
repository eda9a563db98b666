"""Test that the peer trains the same parameters as we do, with the same loss."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from benchmarks.rnnt import peer as peer_module
from benchmarks.rnnt.config import Facts
from benchmarks.rnnt.peer import Network, micro_batch, parts_of, step_of, torchaudio_loss
from common.errors import ConfigError
from common.mlperf.fixed import fixed_facts
from common.optional_packages import OptionalPackage
from tests.benchmarks.rnnt.transducer_oracle import PlainRnnt, by_recursion

CPU = torch.device("cpu")
SMALL = {"encoder_width": 6, "prediction_width": 5, "joint_width": 4, "classes": 7}
STILL = {"encoder_dropout": 0.0, "prediction_dropout": 0.0, "joint_dropout": 0.0}


def plain_loss(logits_BSNV: Tensor, tokens_BU: Tensor, frames_B: Tensor, lengths_B: Tensor) -> Tensor:
    rows = zip(logits_BSNV, tokens_BU.tolist(), frames_B.tolist(), lengths_B.tolist(), strict=True)
    return torch.stack([by_recursion(logits[:frames, : u + 1], tokens[:u]) for logits, tokens, frames, u in rows])


def small_micro_batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "features": torch.randn((8, 3, 240), generator=generator),
        "feature_lengths": torch.tensor([8, 6, 4], dtype=torch.int32),
        "tokens": torch.randint(6, (3, 3), generator=generator, dtype=torch.int32),
        "token_lengths": torch.tensor([3, 1, 2], dtype=torch.int32),
    }


def test_the_peer_has_the_rules_number_of_parameters():
    peer = Network(fixed_facts(Facts, "rnnt"), compiled=False)
    assert sum(parameter.numel() for parameter in peer.parameters()) == 49_006_080


@pytest.mark.parametrize(
    ("logits", "parts"),
    [
        (1, [(0, 1, 4, 3), (1, 2, 3, 1), (2, 3, 2, 2)]),
        (7 * 4 * 4 * 2 + 1, [(0, 2, 4, 3), (2, 3, 2, 2)]),
        (7 * 4 * 4 * 3, [(0, 2, 4, 3), (2, 3, 2, 2)]),
        (7 * 4 * 4 * 3 + 1, [(0, 3, 4, 3)]),
    ],
)
def test_parts_stay_below_the_limit_of_logits(logits, parts):
    found = parts_of(small_micro_batch(), 7, logits)
    assert [(part.start, part.stop, frames, tokens) for part, frames, tokens in found] == parts


@pytest.mark.parametrize("logits", [1, 7 * 4 * 4 * 2 + 1, 1000])
def test_gradients_of_all_parts_equal_those_of_plain_layers(logits):
    torch.manual_seed(0)
    peer = Network(fixed_facts(Facts, "rnnt", **SMALL, **STILL), compiled=False)
    plain = PlainRnnt(240, 6, 5, 4, 7)
    names = {"embed": "pred_embed", "joint.last": "joint_net"}

    def named(name: str) -> str:
        part, _, kind = name.rpartition(".")
        return f"{names.get(part, part)}.{kind}"

    plain.load_state_dict({named(name): weight for name, weight in peer.state_dict().items()})
    tensors = small_micro_batch()
    mean = peer.backward(tensors, plain_loss, lambda loss: 2 * loss, torch.enable_grad, parts_of(tensors, 7, logits))
    lengths = zip(tensors["feature_lengths"].tolist(), tensors["token_lengths"].tolist(), strict=True)
    rows = enumerate(lengths)
    losses = [plain(tensors["features"][:t, row], tensors["tokens"][row, :u].tolist()) for row, (t, u) in rows]
    expected = torch.stack(losses).mean()
    torch.testing.assert_close(mean, expected.detach().float())
    expected.backward()
    wanted = dict(plain.named_parameters())
    for name, parameter in peer.named_parameters():
        torch.testing.assert_close(parameter.grad, 2 * wanted[named(name)].grad, rtol=1e-4, atol=1e-6)


def test_an_iteration_changes_every_parameter():
    torch.manual_seed(0)
    facts = fixed_facts(Facts, "rnnt", **SMALL)
    peer = Network(facts, compiled=False)
    before = {name: parameter.clone() for name, parameter in peer.named_parameters()}
    step = step_of(peer, small_micro_batch(), plain_loss, facts.classes)
    assert step().isfinite()
    assert all(not torch.equal(parameter, before[name]) for name, parameter in peer.named_parameters())


def test_the_peer_is_measured_with_our_average_lengths():
    tensors = micro_batch(fixed_facts(Facts, "rnnt", mel_filters=20), "average", 4, CPU)
    assert tensors["features"].shape == (409, 4, 60)
    assert tensors["tokens"].shape == (4, 56)


def test_a_missing_torchaudio_is_one_error(monkeypatch):
    monkeypatch.setattr(peer_module, "TORCHAUDIO", OptionalPackage("no-torchaudio", ("no_torchaudio:rnnt_loss",)))
    with pytest.raises(ConfigError, match="torchaudio's, and no-torchaudio is not installed"):
        torchaudio_loss(6, torch.float32)
