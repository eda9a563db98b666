"""RNN-T's features on a GPU: kernels against the reference on the CPU in float64, without a wait, in a graph."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from benchmarks.rnnt.config import Facts
from benchmarks.rnnt.lengths import resampled
from benchmarks.rnnt.ops import features
from benchmarks.rnnt.ops.features import reference
from benchmarks.rnnt.ops.features.batch import AudioBatch
from benchmarks.rnnt.preparer import Preparer, made_up
from common.data.batches import HostBatch
from common.mlperf.fixed import fixed_facts

pytestmark = pytest.mark.gpu

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

FACTS = fixed_facts(Facts, "rnnt")
FRAMES, COLUMNS = 160, 256


def utterances(batch: int, seed: int = 0, longest: int = 64_000) -> AudioBatch:
    """Coloured noise between silences, at speeds of 0.85 to 1.15, the last at its own."""
    random = np.random.default_rng(seed)
    length_B = random.integers(1_500, longest, batch)
    speed_B = np.append(random.uniform(0.85, 1.15, batch - 1), 1.0)
    offset_B = np.concatenate([[0], np.cumsum(length_B + 11)[:-1]])
    audio = np.full(offset_B[-1] + length_B[-1], 30000, np.int16)
    for offset, length in zip(offset_B, length_B, strict=True):
        sound = np.convolve(random.normal(0, 4000, length + 8), random.normal(0, 0.4, 9), "valid")
        sound[: length // 6] = sound[length - length // 7 :] = 0
        audio[offset : offset + length] = sound.round().clip(-32768, 32767)
    columns = audio, length_B, offset_B, speed_B, resampled(length_B, speed_B), random.integers(2**63, size=batch)
    return AudioBatch(*(torch.from_numpy(column) for column in columns))


def on_gpu(audio: AudioBatch) -> AudioBatch:
    return AudioBatch(*(getattr(audio, field.name).cuda() for field in dataclasses.fields(audio)))


@pytest.mark.parametrize("augmented", [False, True])
@pytest.mark.parametrize("batch", [1, 5, 32])
@pytest.mark.parametrize("name", ["triton", "reference"])
def test_features_are_those_of_float64(name, batch, augmented):
    audio = utterances(batch)
    found, length_B = features.FEATURES.function(name)(on_gpu(audio), FACTS, FRAMES, COLUMNS, augmented, torch.float32)
    expected, expected_B = reference.features_reference(
        audio, FACTS, FRAMES, COLUMNS, augmented, torch.float64, torch.float64
    )
    assert torch.equal(length_B.cpu(), expected_B)
    assert torch.equal((found == 0).cpu(), expected == 0)  # the same masks
    torch.testing.assert_close(found.cpu().double(), expected, rtol=0, atol=5e-3)
    assert (found.cpu() - expected).abs().mean() < 1e-4


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_rounds_what_single_precision_gives(dtype):
    audio, function = on_gpu(utterances(7)), features.FEATURES.function("triton")
    whole, half = (function(audio, FACTS, FRAMES, COLUMNS, True, kind)[0] for kind in (torch.float32, dtype))
    assert torch.equal(half, whole.to(dtype))


def test_what_becomes_of_an_utterance_depends_on_no_other():
    audio, function = on_gpu(utterances(9)), features.FEATURES.function("triton")
    whole, length_B = function(audio, FACTS, FRAMES, COLUMNS, False, torch.float32)
    slots = [7, 2, 0]
    columns = [getattr(audio, field.name)[slots] for field in dataclasses.fields(audio)[1:]]
    some, some_B = function(AudioBatch(audio.audio_A, *columns), FACTS, 2 * FRAMES, COLUMNS, False, torch.float32)
    assert torch.equal(some[:FRAMES], whole[:, slots])
    assert torch.equal(some_B, length_B[slots])
    assert not some[FRAMES:].any()


@pytest.mark.parametrize("name", ["triton", "reference"])
def test_it_waits_for_nothing_and_a_graph_can_hold_it(name):
    function, given = features.FEATURES.function(name), on_gpu(utterances(6))
    other = on_gpu(utterances(6, seed=1))
    given = dataclasses.replace(given, audio_A=torch.nn.functional.pad(given.audio_A, (0, 400_000))[:400_000])
    other = dataclasses.replace(other, audio_A=torch.nn.functional.pad(other.audio_A, (0, 400_000))[:400_000])
    arguments = FACTS, FRAMES, COLUMNS, True, torch.float16
    with torch.cuda.stream(torch.cuda.Stream()):
        function(given, *arguments)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            function(given, *arguments)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            captured = function(given, *arguments)
        for field in dataclasses.fields(given):
            getattr(given, field.name).copy_(getattr(other, field.name))
        graph.replay()
        eager = function(other, *arguments)
        torch.cuda.synchronize()
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(captured, eager, strict=True))


def test_a_prepared_batch_waits_for_nothing():
    preparer = Preparer(FACTS, COLUMNS, "auto", torch.device("cuda"), torch.float16)
    assert preparer.choice == "triton"
    preparer.warm_up(4, [(60, 9)])
    host = HostBatch({name: tensor.pin_memory() for name, tensor in made_up(FACTS, 4, (60, 9)).items()}, 4, 0, (60, 9))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        batch = preparer(host)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert batch.tensors["features"].shape == (60, 4, COLUMNS)
    assert batch.tensors["features"].dtype == torch.float16
    assert batch.tensors["feature_lengths"].tolist() == [60] * 4
