"""The network against Hugging Face's GPT-2: loss and all gradients; its counts, first losses, and parts."""

import math

import pytest
import torch
from small_gpt3 import B, Passes, S, architecture, hugging_face, losses, network, part, rows, theirs_of

from benchmarks.gpt3.config import GptArchitecture
from common.distributed.pipeline.order import layers_of
from common.distributed.tensor_parallel.ranks import TensorParallel
from common.errors import ConfigError
from common.language.network import EMBEDDING
from tests.generators import generator_of

REAL = GptArchitecture(
    vocabulary=50_257, hidden=12_288, layers=96, heads=96, feed_forward=49_152, positions=2_048,
    norm_epsilon=1e-5, initializer_range=0.006,
)  # fmt: skip
WEIGHTS = 174_604_259_328


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float64, 1e-9), (torch.float32, 2e-5)])
def test_loss_and_all_gradients_are_those_of_hugging_face(dtype, rtol):
    ours = network(dtype)
    theirs = hugging_face(ours)
    tokens_BS, labels_BS = rows()
    logits = theirs(input_ids=tokens_BS.long()).logits
    expected = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), labels_BS.flatten().long(), ignore_index=-1, reduction="none"
    )
    found = losses(ours)
    torch.testing.assert_close(found, expected, rtol=rtol, atol=rtol)
    expected.sum().backward()
    found.sum().backward()
    gradients = {name: parameter.grad for name, parameter in ours.named_parameters()}
    wanted = dict(theirs.named_parameters())
    mapped = theirs_of(ours.architecture, gradients)
    assert {name for name, _ in mapped} == wanted.keys()
    for name, gradient in mapped:
        difference = (gradient - wanted[name].grad).norm() / wanted[name].grad.norm()
        assert difference < rtol, name


def test_padding_has_no_weights_and_no_gradient():
    ours = network()
    losses(ours).sum().backward()
    weight, words = ours.embedding.weight, ours.architecture.vocabulary
    assert len(weight) == 256
    assert not weight[words:].any()
    assert not weight.grad[words:].any()
    assert weight.grad[:words].any(1).all()


def test_the_real_network_has_as_many_weights_as_the_rules_say():
    model = part(REAL, device="meta")
    padding = (REAL.padded_vocabulary(1) - REAL.vocabulary) * REAL.hidden
    assert sum(parameter.numel() for parameter in model.parameters()) - padding == REAL.parameters == WEIGHTS
    assert REAL.parameters_per_layer == 1_812_099_072
    assert [REAL.padded_vocabulary(ranks) for ranks in (1, 2, 4, 8)] == [50_304, 50_432, 50_688, 51_200]


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_the_shards_of_all_ranks_add_up_to_all_parameters(ranks):
    shape = GptArchitecture(**{**vars(REAL), "layers": 2})
    total = 0
    for index in range(ranks):
        model = part(shape, device="meta", parallel=TensorParallel(ranks, index, object()))  # type: ignore[arg-type]
        splits = model.tensor_splits()
        for name, parameter in model.named_parameters():
            if name in splits:
                assert splits[name].local_shape == tuple(parameter.shape), name
            total += parameter.numel() if name in splits or index == 0 else 0
    assert total - (shape.padded_vocabulary(ranks) - shape.vocabulary) * shape.hidden == shape.parameters


def test_flops_of_a_row_are_the_published_ones():
    """In both conventions; the published figures count the head with the rows that eight ranks pad it to."""
    padding = 2.0 * (51_200 - REAL.vocabulary) * REAL.hidden * 2048
    assert 3 * (REAL.forward_flops(2048) + REAL.attention_flops(2048) + padding) == pytest.approx(2204.6e12, rel=1e-4)
    assert 3 * (REAL.forward_flops(2048) + padding) == pytest.approx(2174.9e12, rel=1e-4)
    assert 3 * (REAL.layer_flops(2048) + REAL.attention_flops(2048) / REAL.layers) == pytest.approx(22.88e12, rel=1e-3)
    assert 3 * REAL.layer_flops(2048) == pytest.approx(22.57e12, rel=1e-3)


def test_weights_are_drawn_alike_and_norms_and_biases_are_zero():
    ours = part(architecture(hidden=256, initializer_range=0.006))
    ours.initialise(generator_of)
    for name, parameter in ours.named_parameters():
        if parameter.ndim == 1:
            assert not parameter.any(), name
        else:
            drawn = parameter[:150] if name == EMBEDDING else parameter
            assert float(drawn.detach().std()) == pytest.approx(0.006, rel=0.05), name


def test_the_first_loss_is_that_of_the_published_initialisation():
    """ln V plus half the variance of a logit: of normalised vectors of 256 with weights of 0.04."""
    ours = part(architecture(hidden=256, initializer_range=0.04, vocabulary=4096))
    ours.initialise(generator_of)
    scored = rows(ours.architecture)[1].flatten() >= 0
    found = float(losses(ours, 64)[scored].mean().detach())
    assert found == pytest.approx(math.log(4096) + 256 * 0.04**2 / 2, abs=0.1)


def test_padding_is_not_scored():
    found = losses(network())
    assert (found.view(B, S) == 0).nonzero().tolist() == [[row, S - 1] for row in range(B)]


def test_the_sum_is_that_of_the_losses():
    ours = Passes(network())
    tokens_BS, labels_BS = rows()
    hidden = ours.through(0, ours.embed(tokens_BS), B)
    torch.testing.assert_close(ours.summed_loss(hidden, labels_BS.flatten()), losses(ours).sum())


@pytest.mark.parametrize(("stages", "chunks"), [(2, 1), (2, 2), (4, 1)])
def test_stages_together_hold_and_compute_the_whole_network(stages, chunks):
    whole = network(layers=4)
    weights = dict(whole.named_parameters())
    models, seen = [], []
    for stage in range(stages):
        parts = layers_of(4, stage, stages, chunks)
        model = part(whole.architecture, parts, stage == 0, stage == stages - 1, dtype=torch.float64)
        model.load_state_dict({name: weights[name].detach() for name in model.state_dict()})
        models.append(Passes(model))
        own = dict(model.named_parameters())
        by_chunk = [id(p) for chunk in range(chunks) for p in model.chunk_module(chunk).parameters()]
        assert sorted(by_chunk) == sorted(id(parameter) for parameter in own.values())
        seen += list(own)
    assert set(seen) == weights.keys()
    assert len(seen) == len(weights) + 1  # the embedding is on the first and on the last stage
    tokens_BS, labels_BS = rows()
    hidden = models[0].embed(tokens_BS)
    for chunk in range(chunks):
        for model in models:
            hidden = model.through(chunk, hidden, B)
    found = models[-1].losses(hidden, labels_BS.flatten())
    torch.testing.assert_close(found, losses(whole), rtol=0.0, atol=1e-12)


def test_sizes_that_do_not_fit_are_named():
    with pytest.raises(ConfigError, match="heads=5"):
        architecture(heads=5)
    three = TensorParallel(3, 0, object())  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"layout\.tp=3 does not divide the 4 heads"):
        part(architecture(), device="meta", parallel=three)
