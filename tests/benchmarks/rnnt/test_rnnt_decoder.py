"""Test that decoding many utterances at once equals decoding one token after another."""

from __future__ import annotations

import pytest
import torch
from small_transducer import BLANK, JOINT, SmallTransducer, token_by_token
from torch import Tensor

from benchmarks.rnnt.greedy_decoder import DecodingLimits, GreedyDecoder
from tests.capturable import Capturable

FRAMES = 12
LENGTHS = [12, 0, 1, 7, 12, 3, 2, 9, 5, 12]
CPU = torch.device("cpu")


def encoded(seed: int) -> Tensor:
    """Return random (S, N, J) inputs, also beyond the utterances' lengths."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(FRAMES, len(LENGTHS), JOINT, generator=generator, dtype=torch.float64)


def decoder_of(model: SmallTransducer, limits: DecodingLimits, **options: int) -> GreedyDecoder:
    return GreedyDecoder(model, limits, len(LENGTHS), FRAMES, JOINT, CPU, torch.float64, **options)


def decoded(decoder: GreedyDecoder, f_SNJ: Tensor, lengths: list[int] = LENGTHS) -> list[list[int]]:
    decoder.f_SNJ.copy_(f_SNJ)
    decoder.length_N.copy_(torch.tensor(lengths))
    decoder()
    rows = zip(decoder.token_NM.tolist(), decoder.count_N.tolist(), strict=True)
    return [tokens[:count] for tokens, count in rows]


@pytest.mark.parametrize("unroll", [1, 3])
@pytest.mark.parametrize("look_ahead", [1, 2, 5, 20])
@pytest.mark.parametrize("blank", [-1.0, 2.0, 5.0])
def test_decoding_together_equals_decoding_alone(blank, look_ahead, unroll):
    limits = DecodingLimits(BLANK, frame_symbols=4, symbols=17)
    several = []
    for seed in range(4):
        model, f_SNJ = SmallTransducer(seed, blank), encoded(100 + seed)
        found = decoded(decoder_of(model, limits, look_ahead=look_ahead, unroll=unroll), f_SNJ)
        expected = [token_by_token(model, f_SNJ[:length, n], limits) for n, length in enumerate(LENGTHS)]
        assert found == expected
        several += expected
    assert len({len(tokens) for tokens in several}) > 3, "the case needs utterances with different numbers of tokens"


@pytest.mark.parametrize("look_ahead", [1, 4])
@pytest.mark.parametrize("symbols", [300, 11])
def test_frames_and_utterances_emit_at_most_their_limits(look_ahead, symbols):
    model, limits = SmallTransducer(0, blank=-1000.0), DecodingLimits(BLANK, frame_symbols=3, symbols=symbols)
    f_SNJ = encoded(7)
    found = decoded(decoder_of(model, limits, look_ahead=look_ahead), f_SNJ)
    assert [len(tokens) for tokens in found] == [min(3 * length, symbols) for length in LENGTHS]
    assert found == [token_by_token(model, f_SNJ[:length, n], limits) for n, length in enumerate(LENGTHS)]


def test_blanks_advance_several_frames_at_once():
    model, limits = SmallTransducer(0, blank=1000.0), DecodingLimits(BLANK, frame_symbols=3, symbols=11)
    decoder = decoder_of(model, limits, look_ahead=4, unroll=1)
    assert decoded(decoder, encoded(7)) == [[]] * len(LENGTHS)
    assert decoder.replays == 3 + 1, "12 frames by 4, and one that is queued before the last result is read"


@pytest.mark.parametrize("blank", [1.0, 1000.0])
def test_rows_after_the_last_active_one_are_not_computed(monkeypatch, blank):
    lengths = [12, 10, 12, 1, *[9] * 4, *[7] * 5, *[5] * 15, *[2] * 29, 0]
    model, limits = SmallTransducer(1, blank), DecodingLimits(BLANK, frame_symbols=4, symbols=17)
    f_SNJ = torch.randn(FRAMES, 58, JOINT, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    decoder = GreedyDecoder(model, limits, 58, FRAMES, JOINT, CPU, torch.float64, look_ahead=1, unroll=1)
    seen, step = [], decoder._step
    monkeypatch.setattr(decoder, "_step", lambda rows: (seen.append(rows), step(rows)))
    found = decoded(decoder, f_SNJ, lengths)
    assert found == [token_by_token(model, f_SNJ[:length, n], limits) for n, length in enumerate(lengths)]
    assert seen == sorted(seen, reverse=True)
    if blank == 1000.0:  # the rows that continue after 2, 5 and 7 frames are known one replay later
        assert seen == [58] * 3 + [32] * 3 + [16] * 2 + [8] * 5


def test_a_second_decoding_does_not_depend_on_the_first():
    limits = DecodingLimits(BLANK, frame_symbols=4, symbols=17)
    model = SmallTransducer(1, blank=1.0)
    decoder = decoder_of(model, limits)
    decoder.warm_up()
    first = decoded(decoder, encoded(1))
    reversed_lengths = LENGTHS[::-1]
    again = decoded(decoder, encoded(2), reversed_lengths)
    assert again == [token_by_token(model, encoded(2)[:length, n], limits) for n, length in enumerate(reversed_lengths)]
    assert decoded(decoder, encoded(1)) == first


def test_the_iterations_can_be_captured():
    decoder = decoder_of(SmallTransducer(1), DecodingLimits(BLANK, frame_symbols=4, symbols=17))
    decoder.length_N.fill_(FRAMES)
    with torch.no_grad(), Capturable():
        decoder._begin()
        decoder._iterate(len(LENGTHS), {})
        decoder._iterate(8, {})
