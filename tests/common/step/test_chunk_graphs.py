"""Graphs of chunks' passes, played: accumulated micro-batches as by eager passes, bit for bit, and what they refuse."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from common.data.batches import Batch
from common.distributed.layout import Layout
from common.distributed.pipeline.links import Handed
from common.distributed.pipeline.order import Unit, order
from common.errors import CaptureError
from common.nn.main_gradient import finish, main_gradient
from common.optim.adaptive import AdamW
from common.optim.learning_rate import constant
from common.optim.optimizer import ClipNorm, Optimizer, ParameterGroup
from common.step.capture import explained
from common.step.chunk_graphs import ChunkGraphs, ChunkPlan
from common.step.graphs import StepRunner
from common.step.passes import Chunk
from common.step.pipeline import Pipeline
from common.step.train_step import SAMPLES, Losses, TrainStep, accumulate
from tests.chunk_passes import Stage
from tests.played_graphs import PlayedGraphs

B, E, STEPS = 3, 4, 3


class Written(torch.autograd.Function):
    """A product that adds the gradient of its weight itself, as handwritten blocks do."""

    @staticmethod
    def forward(ctx: Any, x_BE: Tensor, weight: nn.Parameter) -> Tensor:
        ctx.save_for_backward(x_BE)
        ctx.weight = weight
        return x_BE @ weight.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (x_BE,) = ctx.saved_tensors
        main_gradient(ctx.weight).addmm_(x_BE.t(), gradients[0])
        finish(ctx.weight)
        return gradients[0] @ ctx.weight.detach().t(), None


class Net(nn.Module):
    """Half by autograd and half written; counts what it has seen, so that a trace would show."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.first = nn.Linear(E, E)
        self.second = nn.Parameter(torch.empty(E, E))
        for parameter in self.parameters():
            nn.init.normal_(parameter, generator=generator)
        self.register_buffer("seen", torch.zeros(()))
        self.double()

    def loss(self, batch: Batch) -> Losses:
        x_BE = torch.tanh(self.first(batch.tensors["x"]))
        self.seen.add_(batch.tensors["x"].abs().sum())
        hidden_BE: Tensor = Written.apply(x_BE, self.second)
        squares_B = (hidden_BE - batch.tensors["y"]).square().mean(1)
        return Losses(
            squares_B.mean(), {"loss": squares_B.detach().mean().float(), SAMPLES: squares_B.detach().gt(0).sum()}
        )


def batches(count: int, seed: int, key: Hashable = ()) -> list[Batch]:
    generator = torch.Generator().manual_seed(seed)
    return [
        Batch({name: torch.randn(B, E, generator=generator).double() for name in ("x", "y")}, B, key)
        for _ in range(count)
    ]


class Trained:
    """The network and its step, of so many micro-batches, eager or by played graphs."""

    def __init__(self, micro_batches: int, graphs: ChunkGraphs | None = None) -> None:
        layout = Layout()
        self.model, self.prepared = Net(), 0
        self.optimizer = Optimizer(
            [ParameterGroup(dict(self.model.named_parameters()))], AdamW(0.9, 0.95, 1e-8), constant(0.01), layout,
            grad_divisor=micro_batches, clip=ClipNorm(0.1, "after_reduction"),
        )  # fmt: skip
        passes = accumulate(self.model.loss)
        if graphs is not None:
            chunk = Chunk(self.model, lambda _, batch: self.model.loss(batch), self.prepare)
            pipeline = Pipeline(layout, 1, micro_batches, lambda batch: Handed((), torch.float32))  # nothing is sent
            passes = pipeline.forward_backward([chunk], ["loss", SAMPLES], None, graphs)
        self.step = TrainStep(passes, [self.optimizer], layout)
        self.step.chunk_graphs = graphs
        self.played = PlayedGraphs(self.model)
        self.runner = StepRunner(self.step, self.model, micro_batches, recorder=self.played)

    def prepare(self) -> None:
        self.prepared += 1

    def state(self) -> dict[str, Tensor]:
        named = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        named |= dict(self.optimizer.named_state())
        return {name: tensor.detach().clone() for name, tensor in named.items()}

    def train(self, count: int) -> list[list[float]]:
        return [self.runner(batches(count, seed)).values.tolist() for seed in range(STEPS)]


@pytest.mark.parametrize("count", [1, 3, 8])
def test_accumulated_micro_batches_are_those_of_eager_passes_bit_for_bit(count):
    eager, graphs = Trained(count), Trained(count, ChunkGraphs())
    start = eager.state()
    graphs.runner.warm_up(batches(1, 99))
    assert graphs.train(count) == eager.train(count)
    found, wanted = graphs.state(), eager.state()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name
    assert all(not torch.equal(start[name], wanted[name]) for name in ("first.weight", "first.bias", "second"))
    assert graphs.runner.uncaptured == {}


def test_warm_up_leaves_no_trace_and_runs_no_more_micro_batches_than_it_must():
    trained = Trained(1000, ChunkGraphs())
    before, random = trained.state(), torch.get_rng_state()
    trained.runner.warm_up(batches(1, 99))
    for name, tensor in trained.state().items():
        assert torch.equal(tensor, before[name]), name
    assert torch.equal(torch.get_rng_state(), random)
    assert trained.played.replays == 2 * 3  # the step that records, and replays what it has
    assert trained.runner.cost.graphs == 2


def test_weights_are_prepared_once_a_step_and_before_anything_is_recorded():
    trained = Trained(8, ChunkGraphs())
    trained.runner.warm_up(batches(1, 99))
    trained.prepared = 0
    trained.train(8)
    assert trained.prepared == STEPS


def test_gradients_become_final_in_the_order_of_the_last_backward_pass():
    heard = []
    graphs = ChunkGraphs()
    trained = Trained(3, graphs)
    trained.runner.warm_up(batches(1, 99))
    for name, parameter in trained.model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: heard.append(name))
    trained.runner(batches(3, 0))
    assert sorted(heard) == ["first.bias", "first.weight", "second"]  # once, not after each micro-batch
    assert heard[0] == "second"


def test_micro_batches_of_another_key_run_eagerly_and_are_counted():
    eager, graphs = Trained(2), Trained(2, ChunkGraphs())
    graphs.runner.warm_up(batches(1, 99))
    for trained in (eager, graphs):
        trained.runner(batches(2, 0, "new"))
        trained.runner(batches(2, 1))
    assert graphs.runner.uncaptured == {("new", "new"): 1}
    assert torch.equal(graphs.model.second, eager.model.second)


def wide(batch: Batch) -> Batch:
    """Return a micro-batch with more rows, and with a key that says so."""
    return Batch({name: torch.cat([rows, 2 * rows]) for name, rows in batch.tensors.items()}, B, "wide")


def test_micro_batches_of_two_keys_have_graphs_of_their_own_and_equal_eager_passes_bit_for_bit():
    """A step can have one key, the other, or both."""
    eager, graphs = Trained(4), Trained(4, ChunkGraphs())
    graphs.runner.warm_up([*batches(1, 99), wide(*batches(1, 98))])
    assert graphs.runner.cost.graphs == 2 * 2
    for seed in range(3):
        narrow = batches(4, seed)
        given = [narrow, [wide(batch) for batch in narrow], [*narrow[:2], *map(wide, narrow[2:])]][seed]
        assert graphs.runner(given).values.tolist() == eager.runner(given).values.tolist()
    found, wanted = graphs.state(), eager.state()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name
    assert graphs.runner.uncaptured == {}


def test_keys_share_the_memory_of_a_slot():
    trained = Trained(4, ChunkGraphs())
    trained.runner.warm_up([*batches(1, 99), wide(*batches(1, 98))])
    pools = [pool for _, pool in trained.played.recorded]
    assert pools == [("forward", 0, 0), "backward"] * 2


def test_without_a_gpu_or_a_recorder_the_step_is_eager():
    trained, eager = Trained(3, ChunkGraphs()), Trained(3)
    runner = StepRunner(trained.step, trained.model, 3)
    runner.warm_up(batches(1, 99))
    found = [runner(batches(3, seed)).values.tolist() for seed in range(STEPS)]
    assert found == eager.train(3)
    assert trained.played.recorded == []
    assert runner.uncaptured == {}


def test_graphs_end_with_their_runner():
    trained = Trained(2, ChunkGraphs())
    trained.runner.warm_up(batches(1, 99))
    trained.runner.close()
    assert trained.step.chunk_graphs.count == 0


def test_more_micro_batches_under_way_than_there_are_graphs_for_are_an_error():
    graphs, weight = ChunkGraphs(), nn.Parameter(torch.ones(2))
    chunk = Chunk(nn.ParameterList([weight]), lambda x, batch: batch.tensors["x"] * weight)
    plan = ChunkPlan(chunk, 1, None, Handed((2,), torch.float32))
    with graphs.recording(PlayedGraphs(chunk.module)):
        graphs.record([plan], Batch({"x": torch.ones(2)}, 1), None)
    graphs.begin([Unit("forward", 0, 0), Unit("backward", 0, 0), Unit("forward", 0, 1), Unit("backward", 0, 1)])
    with pytest.raises(ValueError, match="chunk 0 has no graphs for so many micro-batches"):
        graphs.begin(order(0, 2, 1, 2))


def test_outputs_keep_their_values_while_graphs_are_replayed_again():
    """A message may be on its way for long: units of one slot, and of others, follow before it has come."""
    graphs, weight = ChunkGraphs(), nn.Parameter(torch.tensor([2.0, 3.0]))
    chunk = Chunk(nn.ParameterList([weight]), lambda x, batch: x * weight)
    handed = Handed((2,), torch.float32)
    with graphs.recording(PlayedGraphs(chunk.module)):
        graphs.record([ChunkPlan(chunk, 2, handed, handed)], Batch({"x": torch.ones(2)}, 1), None)
    units = order(0, 2, 1, 4)
    graphs.begin(units)
    made = {}
    for unit in units:
        given = torch.full((2,), 1.0 + unit.micro_batch)
        if unit.direction == "forward":
            found = graphs.forward(unit, given, Batch({"x": torch.ones(2)}, 1))
        else:
            found = graphs.backward(unit, given, final=False)
        assert isinstance(found, Tensor)
        made[unit] = found
    for unit, found in made.items():
        assert found.tolist() == [2.0 * (1 + unit.micro_batch), 3.0 * (1 + unit.micro_batch)], unit


def test_a_stage_of_two_chunks_computes_the_results_of_eager_passes():
    eager, graphs = Stage(torch.device("cpu")), Stage(torch.device("cpu"), ChunkGraphs())
    with graphs.graphs.recording(PlayedGraphs(*graphs.models)):
        graphs.record()
    wanted, found = eager.run(), graphs.run()
    assert all(torch.equal(found[unit], tensor) for unit, tensor in wanted.items())
    assert all(torch.equal(*pair) for pair in zip(graphs.gradients(), eager.gradients(), strict=True))
    assert graphs.graphs.count > 2 * 8


def failing(error: Callable[[], None]) -> str:
    with pytest.raises(CaptureError) as caught, explained("the backward pass of chunk 3") as watched, watched:
        error()
    return str(caught.value)


def test_a_pass_that_cannot_be_captured_is_named_with_its_operation():
    def reads() -> None:
        torch.ones(()).neg()
        raise RuntimeError("operation not permitted when stream is capturing")

    message = failing(reads)
    assert "the backward pass of chunk 3 can't be captured in a CUDA graph: operation aten.neg.default" in message
    assert "tests/common/step/test_chunk_graphs.py" in message
    assert "not permitted when stream is capturing. Keep host reads" in message
    assert "cuda_graphs=false" in message
