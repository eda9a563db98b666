"""Test RNN-T on a GPU: training step, decoder, evaluation, and averages of the weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.rnnt import example
from benchmarks.rnnt.config import Facts, RnntConfig
from benchmarks.rnnt.data import FeaturePreparer
from benchmarks.rnnt.evaluate import Transcription
from benchmarks.rnnt.greedy_decoder import DecodingLimits, GreedyDecoder
from benchmarks.rnnt.synthetic_evaluation import SyntheticUtterances, draw_emitting_weights, set_threshold
from benchmarks.rnnt.workload import SpeechRecognition
from common import cli
from common.config import loading
from common.config.composition import compose
from common.config.schema import RunConfig
from common.contract.evaluation import Weights
from common.data.batches import Batch
from common.distributed.layout import Layout
from common.mlperf.fixed import fixed_facts
from common.optim.adaptive import LAMB
from common.optim.ema import WeightAverage
from common.optim.optimizer import Optimizer, ParameterGroup
from common.step.graphs import StepRunner
from common.step.train_step import apply_gradients
from tests.benchmarks.rnnt.small_transducer import BLANK, JOINT, SmallTransducer, token_by_token
from tests.gpu.support import captured, relative_error, waiting_is_an_error

pytestmark = pytest.mark.gpu

# The training step


WIDE = [f"benchmark.facts.{name}=128" for name in ("encoder_width", "prediction_width", "joint_width")]
"""Widths that the fast kernels support."""
UPDATE_TOLERANCE = 0.02
"""Largest difference between two runs of a step, relative to the change of the weights. Sums have no fixed order."""


def built(*overrides: str, scale: str = "test") -> SpeechRecognition:
    run, _ = cli.load(compose(["benchmark=rnnt", f"scale={scale}", *overrides]))
    return SpeechRecognition(run, Layout(run.layout, device=torch.device("cuda", 0), seed=7))


def weights(workload: SpeechRecognition) -> dict[str, Tensor]:
    torch.cuda.synchronize()
    return {name: tensor.detach().float().clone() for name, tensor in workload.named_state()}


def batches(workload: SpeechRecognition, seed: int) -> list[Batch]:
    """Return micro-batches with random features and shorter utterances than the examples; their keys take turns."""
    found = []
    for number in range(workload.cfg.grad_accumulation_steps):
        examples = list(workload.example_batches())
        given = examples[number % len(examples)]
        generator = torch.Generator("cuda").manual_seed(seed + number)
        tensors = {name: tensor.clone() for name, tensor in given.tensors.items()}
        tensors["feature_lengths"] -= torch.arange(workload.cfg.micro_batch, device="cuda", dtype=torch.int32) * 2
        noise = torch.randn(tensors["features"].shape, generator=generator, device="cuda")
        frames = torch.arange(len(noise), device="cuda")[:, None] < tensors["feature_lengths"]
        tensors["features"] = (noise * frames[:, :, None]).to(workload.dtype)
        tensors["seed"].fill_(seed + number)
        found.append(Batch(tensors, given.samples, given.key))
    return found


def trained(capture: bool, overrides: list[str], steps: int = 3) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the weights before and after a few steps."""
    workload = built(*overrides)
    step = workload.build_step()
    runner = StepRunner(step, workload.model, workload.cfg.grad_accumulation_steps, capture=capture)
    runner.warm_up(workload.example_batches())
    before = weights(workload)
    with runner.on_stream():
        for number in range(steps):
            result = runner(batches(workload, 100 * number))
    assert torch.isfinite(result.values).all()
    after = weights(workload)
    assert runner.uncaptured == {}
    runner.close()
    return before, after


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_captured_iteration_does_what_an_eager_one_does(precision):
    overrides = [f"precision={precision}", *WIDE, "model.features=256"]
    before, eager = trained(False, overrides)
    again, captured = trained(True, overrides)
    assert all(torch.equal(before[name], again[name]) for name in before), "warm-up has left a trace"
    for name, start in before.items():
        moved = (eager[name] - start).norm()
        assert moved > 0, name
        assert (captured[name] - eager[name]).norm() <= UPDATE_TOLERANCE * moved, name


def test_replays_differ_in_their_dropout():
    workload = built("precision=fp16", *WIDE)
    step = workload.build_step()
    runner = StepRunner(step, workload.model, workload.cfg.grad_accumulation_steps)
    runner.warm_up(workload.example_batches())
    losses = []
    step.skip.fill_(1)
    for seed in (1, 1, 2):
        given = batches(workload, 5)
        for batch in given:
            batch.tensors["seed"].fill_(seed)
        with runner.on_stream():
            result = runner(given)
        losses.append(float(result.values[2 + result.names.index("loss")]))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert abs(losses[2] - losses[0]) > 1e-4 * losses[0]
    runner.close()


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_an_eager_iteration_waits_for_nothing(precision):
    workload = built(f"precision={precision}", *WIDE, "model.features=256")
    runner = StepRunner(workload.build_step(), workload.model, workload.cfg.grad_accumulation_steps, capture=False)
    runner.warm_up(workload.example_batches())
    given = batches(workload, 9)
    torch.cuda.synchronize()
    with runner.on_stream(), waiting_is_an_error():
        runner(given)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_the_rules_network_starts_at_the_loss_of_equal_classes(precision):
    workload = built(
        f"precision={precision}",
        "model.examples=average",
        "reader.buckets=[[410,56]]",
        "micro_batch=16",
        scale="1xH200",
    )
    workload.model.eval()
    losses_B = workload.model.loss(next(iter(workload.example_batches())).tensors, None)
    assert float(losses_B.mean()) == pytest.approx(1680, rel=0.02)


def gradients(workload: SpeechRecognition, tensors: dict[str, Tensor], scale: float = 64.0) -> dict[str, Tensor]:
    """Return the gradients of the mean loss, with dropout."""
    (workload.model.loss(tensors, None).mean() * scale).backward()
    return {name: parameter.grad.float() / scale for name, parameter in workload.model.named_parameters()}


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_gradients_of_the_rules_network_are_those_of_plain_operations_in_fp32(precision):
    common = ["reader.buckets=[[128,30]]", "micro_batch=8"]
    plain = [f"model.implementations.{name}=reference" for name in ("joint", "transducer_loss")]
    plain.append("model.implementations.lstm=library")
    exact = built("precision=fp32", *common, *plain, scale="1xH200")
    ours = built(f"precision={precision}", *common, scale="1xH200")
    ours.model.load_state_dict(exact.model.state_dict())
    exact.model.load_state_dict(ours.model.state_dict())  # the same rounded weights
    facts = fixed_facts(Facts, "rnnt")
    lengths = example.Lengths(np.array([128, 117, 96, 80, 61, 40, 17, 1]), np.array([30, 12, 25, 1, 30, 8, 3, 1]))
    device = torch.device("cuda", 0)
    tensors = example.batch(lengths, (128, 30), facts.features, 256, facts.blank, ours.dtype, device)
    wanted = gradients(exact, {**tensors, "features": tensors["features"].float()})
    for name, found in gradients(ours, tensors).items():
        assert relative_error(found, wanted[name]) < (0.1 if precision == "bf16" else 0.02), name


# Decoder, evaluation and averages


FRAMES, UTTERANCES = 40, 37
LIMITS = DecodingLimits(BLANK, frame_symbols=5, symbols=60)
SMALL = [
    "benchmark=rnnt", "scale=test", "precision=fp16", "benchmark.eval_samples=41", "benchmark.facts.classes=65",
    "benchmark.facts.encoder_width=128", "benchmark.facts.prediction_width=128", "benchmark.facts.joint_width=128",
    "model.features=256", "reader.eval_buckets=[36,56,120]", "reader.eval_batch=16",
]  # fmt: skip


@pytest.fixture
def side_stream() -> Iterator[None]:
    """Run the test on a side stream, which can be captured."""
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


@pytest.mark.usefixtures("side_stream")
@pytest.mark.parametrize("blank", [-1000.0, 0.0, 3.0, 1000.0])
@pytest.mark.parametrize("look_ahead", [1, 4])
def test_replayed_iterations_decode_as_one_token_after_another(look_ahead: int, blank: float) -> None:
    """The test uses fp64, so that products of other shapes give the same classes."""
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


@pytest.mark.usefixtures("side_stream")
def test_nothing_but_the_look_at_the_end_waits_for_the_device() -> None:
    decoder = GreedyDecoder(
        SmallTransducer(3).cuda(), LIMITS, UTTERANCES, FRAMES, JOINT, torch.device("cuda"), torch.float64
    )
    decoder.warm_up()
    decoder.length_N.fill_(FRAMES)
    torch.cuda.synchronize()
    with waiting_is_an_error(), torch.no_grad():
        decoder._begin()
        decoder._replay(UTTERANCES)
        decoder._replay(UTTERANCES)
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


@pytest.mark.usefixtures("side_stream")
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


@pytest.mark.usefixtures("side_stream")
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
    graph, _ = captured(step)
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
