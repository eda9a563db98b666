"""BERT's model against Hugging Face's, its layouts against one another, and the sheet's numbers."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from micro_batches import Sample, back_to_back, draw, lay_out
from small_bert import LARGE, LENGTHS, REFERENCES, SMALL, mean_loss
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import BertConfig, BertForPreTraining

from benchmarks.bert.model import Bert, BertArchitecture, HeadOutputs, pretraining_loss
from benchmarks.bert.tf_checkpoint import load_weights, weights
from common.errors import ConfigError
from common.ops.attention import reference as attention_reference
from common.ops.dropout import reference as dropout_reference
from common.ops.dropout.reference import keep_mask, keep_rows


def build(architecture: BertArchitecture = SMALL, seed: int = 0, dtype: torch.dtype = torch.float64) -> Bert:
    """A model whose biases and norms are not what they start from, since zeros and ones hide mistakes."""
    generator = torch.Generator().manual_seed(seed)
    model = Bert(architecture, generator, REFERENCES, dtype=dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 and name != "masked_lm.bias":
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator).to(dtype)
        words = architecture.vocabulary
        model.masked_lm.bias[:words] = torch.randn(words, generator=generator).to(dtype)
    return model


def packed(samples: list[Sample], **options: int) -> dict[str, Tensor]:
    """The samples back to back, and some padding behind them."""
    return lay_out(samples, back_to_back(samples), (60, 6, 12), **options)


def gradients(model: Bert, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    model.zero_grad()
    mean_loss(model(tensors)).backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def different(found: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    """Names of the gradients that differ by more than rounding."""
    return [name for name in expected if not torch.allclose(found[name], expected[name], rtol=1e-9, atol=1e-13)]


# Against Hugging Face's BertForPreTraining.


def peer(architecture: BertArchitecture, dtype: torch.dtype) -> BertForPreTraining:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=architecture.vocabulary,
        hidden_size=architecture.hidden,
        num_hidden_layers=architecture.layers,
        num_attention_heads=architecture.heads,
        intermediate_size=architecture.feed_forward,
        max_position_embeddings=architecture.max_sequence_length,
        hidden_act="gelu_new",
        layer_norm_eps=1e-12,
        attn_implementation="eager",
    )
    model = BertForPreTraining(config).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.1 * torch.randn_like(parameter)
    return model


def peer_loss(model: BertForPreTraining, samples: list[Sample]) -> Tensor:
    longest = max(len(sample.ids) for sample in samples)
    shape = (len(samples), longest)
    ids, segments, mask = (torch.zeros(shape, dtype=torch.long) for _ in range(3))
    labels = torch.full(shape, -100)
    for row, sample in enumerate(samples):
        length = len(sample.ids)
        ids[row, :length], segments[row, :length], mask[row, :length] = sample.ids, sample.segments, 1
        labels[row, sample.masked] = sample.labels
    sentences = torch.tensor([sample.next_sentence for sample in samples])
    return model(ids, mask, segments, labels=labels, next_sentence_label=sentences).loss


def unlike(found: dict[str, Tensor], theirs: BertForPreTraining, layers: int, tolerance: float) -> list[str]:
    """Names of the weights whose gradients differ, or whose padding has any."""
    names, there = [], dict(theirs.named_parameters())
    for weight in weights(layers):
        gradient, expected = found[weight.parameter], there[weight.torch].grad
        if weight.part is not None:
            gradient = gradient.chunk(3)[weight.part]
        gradient, padding = gradient.split([len(expected), len(gradient) - len(expected)])
        # A key's bias has no gradient: it adds the same to all scores of a row. Rounding is all that is left.
        scale = max(float(expected.abs().max()), 1e-2)
        if float((gradient - expected).abs().max()) > tolerance * scale or padding.any():
            names.append(weight.tf)
    return names


@pytest.mark.slow_cases("large-fp64")
@pytest.mark.parametrize(
    ("architecture", "dtype", "tolerance"),
    [
        (SMALL, torch.float64, 1e-11),
        (SMALL, torch.float32, 1e-5),
        (replace(LARGE, vocabulary=1000, layers=2, max_sequence_length=64), torch.float64, 1e-11),
        (replace(LARGE, vocabulary=1000, layers=2, max_sequence_length=64), torch.float32, 1e-4),
    ],
    ids=["small-fp64", "small-fp32", "large-fp64", "large-fp32"],
)
def test_loss_and_gradients_are_hugging_faces(architecture, dtype, tolerance, tmp_path):
    theirs = peer(architecture, dtype)
    torch.save({"model": theirs.state_dict()}, tmp_path / "peer.pt")
    model = Bert(architecture, None, REFERENCES, dtype=dtype).eval()
    load_weights(model, tmp_path / "peer.pt")
    samples = draw(LENGTHS, architecture.vocabulary)

    expected = peer_loss(theirs, samples)
    expected.backward()
    tensors = packed(samples)
    torch.testing.assert_close(mean_loss(model(tensors)), expected, rtol=tolerance, atol=0)

    assert not unlike(gradients(model, tensors), theirs, architecture.layers, tolerance)


def test_with_dropout_everywhere_loss_and_gradients_are_hugging_faces(monkeypatch, tmp_path):
    # Rows of the longest sequence: flat indices are theirs too, and their n-th dropout has our n-th site's mask.
    theirs, sites = peer(SMALL, torch.float64).train(), iter(range(7))
    seed, samples = torch.tensor(8), draw([9, SMALL.max_sequence_length, 2, 12], SMALL.vocabulary)

    def drop(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        assert training
        assert p == 0.1
        elements = torch.arange(x.numel()).view(x.shape)
        if x.ndim == 4:  # (row, head, query, key) of theirs is (row, query, head, key) of ours
            rows, heads, queries, keys = x.shape
            elements = torch.arange(x.numel()).view(rows, queries, heads, keys).transpose(1, 2)
        return x * keep_mask(seed, next(sites), elements, p) * (65536 / (65536 - 6554))

    torch.save({"model": theirs.state_dict()}, tmp_path / "peer.pt")
    model = Bert(SMALL, None, REFERENCES, dtype=torch.float64).train()
    load_weights(model, tmp_path / "peer.pt")
    tensors = lay_out(samples, [16 * row for row in range(4)], (64, 4, 8), seed=int(seed))
    found = gradients(model, tensors)
    loss = mean_loss(model(tensors))

    monkeypatch.setattr(torch.nn.functional, "dropout", drop)
    expected = peer_loss(theirs, samples)
    expected.backward()
    assert next(sites, None) is None
    torch.testing.assert_close(loss, expected, rtol=1e-11, atol=0)
    assert not unlike(found, theirs, SMALL.layers, 1e-11)


# One set of sequences in several layouts.


def alone(model: Bert, samples: list[Sample]) -> tuple[Tensor, Tensor]:
    """Losses of masked tokens and of sequences, each sequence in a buffer of its own."""
    masked, sentences = [], []
    for sample in samples:
        heads = model(lay_out([sample], [0], (len(sample.ids), 1, len(sample.masked))))
        masked.append(heads.masked_lm_losses)
        sentences.append(heads.next_sentence_losses)
    return torch.cat(masked), torch.cat(sentences)


def layouts(samples: list[Sample]) -> dict[str, dict[str, Tensor]]:
    """The samples, in that order, at other places of other buffers."""
    rows = [16 * row for row in range(len(samples))]
    return {
        "packed": packed(samples),
        "rows of their own": lay_out(samples, rows, (64, 4, 8)),
        "backwards with gaps": lay_out(samples, [50, 31, 28, 3], (70, 4, 8)),
    }


@pytest.mark.parametrize("layout", ["packed", "rows of their own", "backwards with gaps"])
def test_every_layout_has_the_losses_of_single_sequences(layout):
    model, samples = build().eval(), draw(LENGTHS, SMALL.vocabulary)
    masked, sentences = alone(model, samples)
    heads = model(layouts(samples)[layout])
    torch.testing.assert_close(heads.masked_lm_losses[: len(masked)], masked, rtol=1e-12, atol=0)
    torch.testing.assert_close(heads.next_sentence_losses[: len(samples)], sentences, rtol=1e-12, atol=0)


@pytest.mark.parametrize("layout", ["rows of their own", "backwards with gaps"])
def test_every_layout_has_the_gradients_of_packed_sequences(layout):
    model, samples = build().eval(), draw(LENGTHS, SMALL.vocabulary)
    expected = gradients(model, packed(samples))
    found = gradients(model, layouts(samples)[layout])
    for name, gradient in expected.items():
        torch.testing.assert_close(
            found[name], gradient, rtol=1e-9, atol=1e-13, msg=lambda text, n=name: f"{n}: {text}"
        )


def test_with_dropout_neither_capacity_nor_the_order_of_the_list_matters():
    model, samples = build().train(), draw(LENGTHS, SMALL.vocabulary)
    starts = back_to_back(samples)
    tight = sum(len(sample.ids) for sample in samples)
    one = gradients(model, lay_out(samples, starts, (tight, 4, 8)))
    other = gradients(model, lay_out(samples[::-1], starts[::-1], (tight + 37, 9, 20)))
    without = gradients(model.eval(), lay_out(samples, starts, (tight, 4, 8)))
    for name, gradient in one.items():
        torch.testing.assert_close(
            other[name], gradient, rtol=1e-9, atol=1e-13, msg=lambda text, n=name: f"{n}: {text}"
        )
    assert not torch.allclose(one["layers.0.mlp.up.weight"], without["layers.0.mlp.up.weight"], rtol=1e-3)


def test_every_parameter_receives_its_gradient_once():
    model, arrived = build().train(), []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: arrived.append(name))
    mean_loss(model(packed(draw(LENGTHS, SMALL.vocabulary)))).backward()
    assert sorted(arrived) == sorted(name for name, _ in model.named_parameters())


# Dropout.


def test_every_dropout_has_a_site_of_its_own(monkeypatch):
    sites = []
    original = keep_rows

    def record(seed: Tensor, site: int, *rest: object) -> Tensor:
        sites.append(site)
        return original(seed, site, *rest)

    monkeypatch.setattr(dropout_reference, "keep_rows", record)
    monkeypatch.setattr(attention_reference, "keep_rows", record)
    build().train()(packed(draw(LENGTHS, SMALL.vocabulary)))
    assert sites == [0, 1, 2, 3, 4, 5, 6]


def test_dropout_follows_the_seed_and_only_in_training():
    model, samples = build(), draw(LENGTHS, SMALL.vocabulary)

    def losses(seed: int, training: bool) -> Tensor:
        return model.train(training)(packed(samples, seed=seed)).masked_lm_losses

    assert torch.equal(losses(1, True), losses(1, True))
    assert not torch.equal(losses(1, True), losses(2, True))
    assert torch.equal(losses(1, False), losses(2, False))


# Sizes, initial weights and loss.


def test_parameters_are_counted_as_in_the_sheet():
    model = Bert(LARGE, None, REFERENCES, device="meta")
    counts = {name: sum(p.numel() for p in block.parameters()) for name, block in model.blocks}
    padding = model.architecture.padded_vocabulary - 30522
    assert padding == 6
    assert counts.pop("embeddings") - padding * 1024 == 31_782_912
    assert counts.pop("pooler") == 1_049_600
    assert counts.pop("masked_lm") - padding == 1_082_170
    assert counts.pop("next_sentence") == 2_050
    assert list(counts.values()) == [12_596_224] * 24
    assert sum(p.numel() for p in model.parameters()) - padding * 1025 == 336_226_108


def test_blocks_hold_every_parameter_once():
    model = Bert(SMALL, None, REFERENCES, device="meta")
    held = [f"{name}.{inner}" for name, block in model.blocks for inner, _ in block.named_parameters()]
    assert held == [name for name, _ in model.named_parameters()]


def test_a_block_reads_its_parameters_in_its_own_forward_only():
    model, tensors = build().eval(), packed(draw(LENGTHS, SMALL.vocabulary))
    expected = mean_loss(model(tensors))
    arrived = []

    def gather(block: torch.nn.Module, inputs: object) -> None:
        arrived.append(block)
        for parameter, value in zip(block.parameters(), values[block], strict=True):
            parameter.data.copy_(value)

    values = {}
    for _, block in model.blocks:
        values[block] = [parameter.detach().clone() for parameter in block.parameters()]
        block.register_forward_pre_hook(gather)
        for parameter in block.parameters():
            parameter.data.fill_(math.nan)
    assert torch.equal(mean_loss(model(tensors)), expected)
    assert arrived == [block for _, block in model.blocks]


def test_initial_weights_are_cut_normals_and_nothing_else():
    sizes = {"hidden": 256, "layers": 1, "heads": 4, "feed_forward": 512}
    architecture = replace(LARGE, vocabulary=1000, max_sequence_length=64, **sizes)
    model = Bert(architecture, torch.Generator().manual_seed(3), REFERENCES)
    for name, parameter in model.named_parameters():
        values = parameter.detach()
        if name.endswith("norm.weight"):
            assert torch.equal(values, torch.ones_like(values)), name
        elif values.ndim == 1:
            assert not values.any(), name
        else:
            drawn = values[:1000] if name == "embeddings.word.weight" else values
            assert drawn.abs().max() <= 0.04, name
            # standard deviation of a unit normal that is cut at 2
            spread = drawn.std() / (0.02 * 0.87962566)
            assert abs(spread - 1) < 4 / math.sqrt(2 * drawn.numel()) + 1e-3, name
    assert not model.embeddings.word.weight[1000:].any()


def test_initial_weights_are_a_function_of_the_generator():
    one, same, other = (Bert(SMALL, torch.Generator().manual_seed(seed), REFERENCES).state_dict() for seed in (5, 5, 6))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["layers.1.mlp.up.weight"], other["layers.1.mlp.up.weight"])


def heads_of(masked: list[float], sentences: list[float], labelled: int, present: int) -> HeadOutputs:
    return HeadOutputs(
        torch.tensor(masked),
        torch.zeros(len(masked), dtype=torch.bool),
        torch.arange(len(masked)) < labelled,
        torch.tensor(sentences),
        torch.arange(len(sentences)) < present,
    )


def test_loss_is_the_sum_of_both_means():
    losses = pretraining_loss(heads_of([3.0, 4.0, 0.0], [0.5, 0.7, 0.9, 0.0], 2, 3))
    assert float(losses.metrics["masked_lm_loss"]) == pytest.approx(7 / 2.00001, rel=1e-7)
    assert float(losses.metrics["next_sentence_loss"]) == pytest.approx(0.7)
    assert float(losses.total) == pytest.approx(7 / 2.00001 + 0.7)


def test_a_micro_batch_without_anything_has_loss_0():
    assert float(pretraining_loss(heads_of([0.0, 0.0], [0.0], 0, 0)).total) == 0.0


def test_correct_predictions_are_those_of_the_largest_logit():
    model, samples = build().eval(), draw(LENGTHS, SMALL.vocabulary)
    tensors = packed(samples)
    with torch.no_grad():
        model.masked_lm.bias[:150] = -100.0
        model.masked_lm.bias[150:] = 100.0  # padding, which must not win
        model.masked_lm.bias[int(samples[1].labels[0])] = 0.0
    labels = tensors["masked_labels"]
    heads = model(tensors)
    assert torch.equal(heads.correct, labels == int(samples[1].labels[0]))
    assert torch.equal(heads.masked, labels >= 0)
    assert torch.equal(heads.present, tensors["lengths"] > 0)


def test_in_evaluation_words_that_bf16_cannot_tell_apart_do_not_tie():
    model, samples = build(dtype=torch.bfloat16).eval(), draw(LENGTHS, SMALL.vocabulary)
    close, largest = 7, 90
    with torch.no_grad():
        model.masked_lm.norm.weight.zero_()  # every hidden state is then the norm's bias, 1 in the first feature
        model.masked_lm.norm.bias.copy_(torch.eye(SMALL.hidden)[0])
        model.masked_lm.bias.fill_(-100.0)
        model.masked_lm.bias[[close, largest]] = 16.0
        model.embeddings.word.weight[close, 0] = 0.0
        model.embeddings.word.weight[largest, 0] = 1 / 64  # bf16 numbers at 16 are 1/8 apart
        for sample in samples:
            sample.labels.fill_(largest)
        heads = model(packed(samples))
    assert torch.equal(heads.correct, heads.masked)


def test_word_0_is_a_label_like_any_other():
    model, samples = build().eval(), draw(LENGTHS, SMALL.vocabulary)
    samples[0].labels[0] = 0
    heads = model(packed(samples))
    assert heads.masked[0]
    assert heads.masked_lm_losses[0] > 0


def test_bf16_model_is_close_to_its_fp32_twin_and_has_fp32_losses():
    single, samples = build(dtype=torch.float32), draw(LENGTHS, SMALL.vocabulary)
    half = build(dtype=torch.bfloat16)
    heads, expected = half(packed(samples)), single(packed(samples))
    assert heads.masked_lm_losses.dtype == heads.next_sentence_losses.dtype == torch.float32
    torch.testing.assert_close(heads.masked_lm_losses, expected.masked_lm_losses, rtol=0.03, atol=0.03)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}


def test_flops_are_the_sheets():
    # per token 1.812 G and 0.295 M times the mean length, per masked token 194 M
    expected = 1.812e9 * 768 + 0.2949e6 * (512**2 + 256**2) + 194e6 * 100
    assert LARGE.training_flops([512, 256], 100) == pytest.approx(expected, rel=1e-3)


# How it runs.


def test_nothing_waits_for_the_device_and_no_shape_depends_on_data():
    # Fake tensors have no values: .item(), a condition on a tensor or a data-dependent shape raises.
    tensors = packed(draw(LENGTHS, SMALL.vocabulary))
    with FakeTensorMode() as mode:
        model = Bert(SMALL, None, REFERENCES, dtype=torch.bfloat16).train()
        fake = {name: mode.from_tensor(tensor) for name, tensor in tensors.items()}
        pretraining_loss(model(fake)).total.backward()
        assert all(parameter.grad.shape == parameter.shape for parameter in model.parameters())


def test_implementations_are_chosen_and_reported_when_the_model_is_built():
    operations = ["attention", "dropout", "dropout_add_norm", "bias_gelu", "cross_entropy", "linear"]
    assert Bert(SMALL, None, dtype=torch.float64).chosen == dict.fromkeys(operations, "reference")


def test_heads_that_do_not_divide_are_an_error():
    with pytest.raises(ConfigError, match="hidden=32: a positive multiple of heads=5"):
        replace(SMALL, heads=5)
