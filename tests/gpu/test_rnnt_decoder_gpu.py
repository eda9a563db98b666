"""RNN-T's decoder and evaluation on a GPU: graphs give what eager runs give; averages stay exact in a graph."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.rnnt.config import RnntConfig
from benchmarks.rnnt.data import FeaturePreparer
from benchmarks.rnnt.evaluate import Transcription
from benchmarks.rnnt.greedy_decoder import DecodingLimits, GreedyDecoder
from benchmarks.rnnt.synthetic_speech import SyntheticUtterances, draw_emitting_weights, set_threshold
from benchmarks.rnnt.workload import SpeechRecognition
from common.config import loading
from common.config.composition import compose
from common.config.schema import RunConfig
from common.contract.evaluation import Weights
from common.distributed.layout import Layout
from common.optim.adaptive import LAMB
from common.optim.ema import WeightAverage
from common.optim.optimizer import Optimizer, ParameterGroup
from common.step.train_step import apply_gradients
from tests.benchmarks.rnnt.small_transducer import BLANK, JOINT, SmallTransducer, token_by_token

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

FRAMES, UTTERANCES = 40, 37
LIMITS = DecodingLimits(BLANK, frame_symbols=5, symbols=60)
SMALL = [
    "benchmark=rnnt", "scale=test", "precision=fp16", "benchmark.eval_samples=41", "benchmark.facts.classes=65",
    "benchmark.facts.encoder_width=128", "benchmark.facts.prediction_width=128", "benchmark.facts.joint_width=128",
    "model.features=256", "reader.eval_buckets=[36,56,120]", "reader.eval_batch=16",
]  # fmt: skip


@pytest.fixture(autouse=True)
def side_stream() -> Iterator[None]:
    """A stream that can be captured."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.synchronize()


def decoded(decoder: GreedyDecoder, f_SNJ: Tensor, lengths: list[int]) -> list[list[int]]:
    decoder.f_SNJ.copy_(f_SNJ)
    decoder.length_N.copy_(torch.tensor(lengths))
    decoder()
    rows = zip(decoder.token_NM.tolist(), decoder.count_N.tolist(), strict=True)
    return [tokens[:count] for tokens, count in rows]


@pytest.mark.parametrize("blank", [-1000.0, 0.0, 3.0, 1000.0])
@pytest.mark.parametrize("look_ahead", [1, 4])
def test_replayed_iterations_decode_as_one_token_after_another(look_ahead: int, blank: float) -> None:
    """In fp64, so that products of other shapes choose the same classes."""
    model = SmallTransducer(3, blank).cuda()
    device = torch.device("cuda")
    decoder = GreedyDecoder(model, LIMITS, UTTERANCES, FRAMES, JOINT, device, torch.float64, look_ahead=look_ahead)
    decoder.warm_up()
    for seed in range(2):  # the second finds what the first left
        generator = torch.Generator().manual_seed(seed)
        f_SNJ = torch.randn(FRAMES, UTTERANCES, JOINT, generator=generator, dtype=torch.float64).cuda()
        lengths = torch.randint(FRAMES + 1, (UTTERANCES,), generator=generator).tolist()
        found = decoded(decoder, f_SNJ, lengths)
        assert found == [token_by_token(model, f_SNJ[:length, n], LIMITS) for n, length in enumerate(lengths)]
    longest = max(map(len, found))
    assert longest == {-1000.0: LIMITS.symbols, 1000.0: 0}.get(blank, longest)
    decoder.close()


def test_nothing_but_the_look_at_the_end_waits_for_the_device() -> None:
    decoder = GreedyDecoder(
        SmallTransducer(3).cuda(), LIMITS, UTTERANCES, FRAMES, JOINT, torch.device("cuda"), torch.float64
    )
    decoder.warm_up()
    decoder.length_N.fill_(FRAMES)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.no_grad():
            decoder._begin()
            decoder._replay(UTTERANCES)
            decoder._replay(UTTERANCES)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    decoder.close()


def small_run(*overrides: str) -> RunConfig:
    return loading.load(compose([*SMALL, *overrides]), lambda _: SpeechRecognition)[0]


def samples_of(run: RunConfig) -> np.ndarray:
    own: RnntConfig = run.workload
    most = own.facts.largest_resampled(max(own.reader.eval_buckets))
    return np.random.default_rng(1).integers(most // 40, most, run.benchmark.eval_samples)


def evaluation_of(run: RunConfig, workload: SpeechRecognition, samples_N: np.ndarray, capture: bool) -> Transcription:
    own, device = workload.own, workload.layout.device
    source = SyntheticUtterances(samples_N, own, workload.layout)
    preparer = FeaturePreparer(
        own.facts, own.model.features, own.model.implementations["audio"], device, workload.dtype
    )
    evaluation = Transcription(
        workload.model, own, lambda root: source, len(samples_N), workload.layout, preparer, capture
    )
    evaluation.warm_up()
    evaluation.open_data(Path())
    return evaluation


def test_a_captured_evaluation_is_the_eager_one_and_leaves_the_weights_in_training() -> None:
    run = small_run()
    workload = SpeechRecognition(run, Layout(run.layout, device=torch.device("cuda"), seed=1))
    model, samples_N = workload.model, samples_of(run)
    torch.manual_seed(0)  # of the noise that is heard
    captured = evaluation_of(run, workload, samples_N, capture=True)
    torch.manual_seed(0)
    eager = evaluation_of(run, workload, samples_N, capture=False)
    start = {name: weight.clone() for name, weight in model.state_dict().items()}
    draw_emitting_weights(model)
    model.eval()
    set_threshold(model, captured, tokens=400)
    spoken = Weights({name: weight.detach().clone() for name, weight in model.named_parameters()})
    model.load_state_dict(start)
    model.train()
    values = []
    for evaluation in (captured, eager, captured):
        predictions = evaluation.predict(spoken)
        assert predictions is not None
        values.append(predictions.values)
        assert model.training
        assert all(torch.equal(weight, start[name]) for name, weight in model.state_dict().items())
    for name in values[0]:
        assert np.array_equal(values[0][name], values[1][name]), name
        assert np.array_equal(values[0][name], values[2][name]), name
    assert sorted(values[0]["utterance"]) == list(range(len(samples_N)))
    assert 100 < len(values[0]["tokens"]) < 1600
    captured.close()
    eager.close()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_averages_in_a_graph_follow_the_recursion_and_a_skipped_step_leaves_them(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    weight = torch.nn.Parameter(torch.randn(300, 70, generator=generator).to("cuda", dtype))
    optimizer = Optimizer(
        [ParameterGroup({"weight": weight}, weight_decay=1e-3, trust_ratio=True)], LAMB(epsilon=1e-9),
        lambda step: torch.full_like(step, 0.125, dtype=torch.float32), Layout(device=torch.device("cuda")),
        grad_divisor=1.0,
    )  # fmt: skip
    average = WeightAverage(optimizer, 0.75)
    gradient, skip = torch.zeros_like(weight), torch.zeros((), device="cuda")

    def step() -> None:
        for updater in (optimizer, average):
            updater.begin()
        assert weight.grad is not None
        weight.grad.add_(gradient)
        for updater in (optimizer, average):
            updater.arm()
            updater.collect()
        apply_gradients([optimizer, average], skip)

    def state() -> dict[str, Tensor]:
        named = [*optimizer.named_state(), *average.named_state()]
        return {f"{number}.{name}": tensor.clone() for number, (name, tensor) in enumerate(named)}

    before = state()
    skip.fill_(1.0)
    for _ in range(3):
        step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        step()
    graph.replay()
    assert all(torch.equal(tensor, before[name]) for name, tensor in state().items()), "skipped steps leave every bit"

    def master() -> np.ndarray:
        kept = optimizer.state_dict().get("masters", {}).get("weight", weight.detach().cpu())
        return kept.double().numpy()

    skip.zero_()
    expected = master()
    for number in range(4):
        gradient.copy_(torch.randn(300, 70, generator=torch.Generator().manual_seed(number)))
        graph.replay()
        expected = 0.75 * expected + 0.25 * master()
    found = average.state_dict()["average"]["weight"]
    np.testing.assert_allclose(found.double().numpy(), expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(average.weights()["weight"].cpu(), found.to(dtype))
