"""Test RNN-T's features on a GPU: per utterance, without waiting for the device, and in a CUDA graph."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from benchmarks.rnnt.config import Facts
from benchmarks.rnnt.data import FeaturePreparer, synthetic_batch
from benchmarks.rnnt.ops import features
from benchmarks.rnnt.ops.features.cases import utterances_of
from benchmarks.rnnt.ops.features.reference import AudioBatch
from common.data.batches import HostBatch
from common.mlperf.fixed import fixed_facts
from common.ops.cases import Draw

pytestmark = pytest.mark.gpu

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

FACTS = fixed_facts(Facts, "rnnt")
FRAMES, COLUMNS = 160, 256


def utterances(batch: int, longer: int = 0) -> AudioBatch:
    """Return ``batch`` utterances of up to 3 s."""
    lengths = [(1_500 + 5_501 * number % 40_000 + longer, 0.85 + 0.04 * (number % 8)) for number in range(batch)]
    return utterances_of(lengths, Draw(torch.device("cuda"), torch.float32))


def test_what_becomes_of_an_utterance_depends_on_no_other():
    audio, function = utterances(9), features.FEATURES.function("triton")
    whole, length_B = function(audio, FACTS, FRAMES, COLUMNS, False, torch.float32)
    slots = [7, 2, 0]
    columns = [getattr(audio, field.name)[slots] for field in dataclasses.fields(audio)[1:]]
    some, some_B = function(AudioBatch(audio.audio_A, *columns), FACTS, 2 * FRAMES, COLUMNS, False, torch.float32)
    assert torch.equal(some[:FRAMES], whole[:, slots])
    assert torch.equal(some_B, length_B[slots])
    assert not some[FRAMES:].any()


@pytest.mark.parametrize("name", ["triton", "reference"])
def test_it_waits_for_nothing_and_a_graph_can_hold_it(name):
    function, given = features.FEATURES.function(name), utterances(6)
    other = utterances(6, longer=777)
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
    preparer = FeaturePreparer(FACTS, COLUMNS, "auto", torch.device("cuda"), torch.float16)
    assert preparer.choice == "triton"
    preparer.warm_up(4, [(60, 9)])
    host = HostBatch(
        {name: tensor.pin_memory() for name, tensor in synthetic_batch(FACTS, 4, (60, 9)).items()}, 4, 0, (60, 9)
    )
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        batch = preparer(host)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert batch.tensors["features"].shape == (60, 4, COLUMNS)
    assert batch.tensors["features"].dtype == torch.float16
    assert batch.tensors["feature_lengths"].tolist() == [60] * 4
