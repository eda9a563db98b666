"""Residual blocks between a tied embedding and head, divided into stages, and what each rank finds of their training.

B rows of a micro-batch, S tokens of a row, V words, E features.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from common.contract.evaluation import Weights
from common.data.batches import Batch
from common.distributed.layout import Layout
from common.distributed.pipeline.links import Handed
from common.distributed.pipeline.order import layers_of
from common.evaluation.counts import Counts
from common.evaluation.forward import evaluating
from common.optim.adaptive import AdamW
from common.optim.learning_rate import constant
from common.optim.optimizer import ClipNorm, Optimizer, ParameterGroup
from common.run import checkpoint
from common.run.checkpoint import Progress
from common.step.chunk_graphs import ChunkGraphs
from common.step.graphs import StepRunner
from common.step.passes import Chunk
from common.step.pipeline import Pipeline
from common.step.train_step import DeviceResult, ForwardBackward, Losses, TrainStep, accumulate
from tests.played_graphs import PlayedGraphs

B, S, V, E, LAYERS, SAMPLES_OF_A_STEP, STEPS, SAVED_AFTER = 2, 5, 11, 8, 8, 16, 3, 2
MAX_NORM = 0.05
SETTINGS: dict[str, Any] = {"precision": "fp64"}

LAYOUTS: dict[int, dict[str, tuple[dict[str, int], int]]] = {
    2: {"pp2": ({"pp": 2}, 1), "pp2 x 2": ({"pp": 2}, 2)},
    4: {"pp4 x 2": ({"pp": 4}, 2), "pp2 x dp2": ({"pp": 2, "dp": 2}, 1), "pp2 x 2 x dp2": ({"pp": 2, "dp": 2}, 2)},
}
"""Ranks to name to the layout's axes and the chunks on every stage."""


class Block(nn.Module):
    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(E, 2 * E), nn.Linear(2 * E, E)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.3, generator=generator)

    def forward(self, x_BSE: Tensor) -> Tensor:
        x: Tensor = x_BSE + self.down(torch.tanh(self.up(F.layer_norm(x_BSE, (E,)))))
        return x


class Staged(nn.Module):
    """The part of the model that a stage has, by the names of the whole."""

    def __init__(self, stage: int, stages: int, chunks: int, depth: int = LAYERS) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.parts = layers_of(depth, stage, stages, chunks)
        every = {str(index): Block(generator) for index in range(depth)}
        self.layers = nn.ModuleDict({str(index): every[str(index)] for part in self.parts for index in part})
        words, places = torch.randn(V, E, generator=generator) / 4, torch.randn(S, E, generator=generator) / 4
        if stage in (0, stages - 1):
            self.words = nn.Parameter(words)
        if stage == 0:
            self.places = nn.Parameter(places)
        if stage == stages - 1:
            self.scale = nn.Parameter(torch.ones(E))
        self.double()

    def embed(self, tokens_BS: Tensor) -> Tensor:
        return self.words[tokens_BS] + self.places

    def through(self, chunk: int, x_BSE: Tensor) -> Tensor:
        for index in self.parts[chunk]:
            x_BSE = self.layers[str(index)](x_BSE)
        return x_BSE

    def losses(self, x_BSE: Tensor, tokens_BS: Tensor) -> Tensor:
        logits = F.layer_norm(x_BSE, (E,)) * self.scale @ self.words.T
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens_BS[:, 1:].flatten())


def batches(step: int, layout: Layout, count: int = SAMPLES_OF_A_STEP // B) -> list[Batch]:
    """This replica's micro-batches; all ranks together have the same samples in every layout."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(V, (count, B, S), generator=generator)
    mine = range(layout.coordinate("dp"), count, layout.size("dp"))
    return [Batch({"tokens": tokens[number].to(layout.device)}, B) for number in mine]


class Chunked(nn.Module):
    """The modules of one chunk, for its parameters."""

    def __init__(self, *modules: nn.Module, **parameters: nn.Parameter) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(modules)
        for name, parameter in parameters.items():
            self.register_parameter(name, parameter)


class Trainee:
    """A stage, its step and its evaluation on one rank."""

    def __init__(
        self, layout: Layout, chunks: int = 1, depth: int = LAYERS, graphs: ChunkGraphs | None = None, **options: Any
    ) -> None:
        stage, stages = layout.coordinate("pp"), layout.size("pp")
        self.layout, self.chunks = layout, chunks
        self.model = model = Staged(stage, stages, chunks, depth).to(layout.device)
        named = dict(model.named_parameters())
        tied = {"words": named.pop("words")} if "words" in named else {}
        groups = [ParameterGroup(named, 0.1), ParameterGroup(tied, 0.1, tied_over=("pp",))]
        count = SAMPLES_OF_A_STEP // B // layout.size("dp")
        self.pipeline = Pipeline(layout, chunks, count, lambda batch: Handed((B, S, E), torch.float64))
        blocks = [(name, layer) for name, layer in model.layers.items()]
        self.optimizer = Optimizer(
            groups, AdamW(0.9, 0.95, 1e-8), constant(0.01), layout, grad_divisor=SAMPLES_OF_A_STEP / B,
            clip=ClipNorm(MAX_NORM, "after_reduction"), bucket_bytes=1000, blocks=blocks, **options,
        )  # fmt: skip
        if stages == 1 and graphs is None:
            passes = accumulate(lambda batch: self.part(0, None, batch))
        else:
            every = [self.chunk(number) for number in range(chunks)]
            passes = self.pipeline.forward_backward(every, ["loss"], None, graphs)
        self.reduced = self.most_alive = 0
        self.handed_on: list[weakref.ref[Tensor]] = []
        self.step = TrainStep(self.watched(passes), [self.optimizer], layout)
        self.step.chunk_graphs = graphs
        self.step.rehearsing = self.pipeline.rehearsing if stages > 1 else None
        self.run: Callable[[list[Batch]], DeviceResult] = self.step

    def watched(self, passes: ForwardBackward) -> ForwardBackward:
        """Note how many buckets are on their way when all that is left is the first chunk's last backward pass."""

        def watching(micro_batches: Any, arm: Any, collect: Any) -> dict[str, Tensor]:
            def arming(part: nn.Module | None = None) -> None:
                if part is None:
                    self.reduced = self.optimizer._reducer.launched
                arm(part)

            return passes(micro_batches, arming, collect)

        return watching

    def part(self, chunk: int, x_BSE: Tensor | None, batch: Batch) -> Any:
        first = self.pipeline.first and chunk == 0
        last = self.pipeline.last and chunk == self.chunks - 1
        assert (x_BSE is None) == first
        tokens_BS = batch.tensors["tokens"]
        x_BSE = self.model.through(chunk, self.model.embed(tokens_BS) if x_BSE is None else x_BSE)
        if not last:
            self.most_alive = max(self.most_alive, sum(reference() is not None for reference in self.handed_on))
            self.handed_on.append(weakref.ref(x_BSE))
            return x_BSE
        loss = self.model.losses(x_BSE, tokens_BS)
        return Losses(loss, {"loss": loss.detach()})

    def chunk(self, number: int) -> Chunk:
        others = dict(self.model.named_parameters(recurse=False))
        first = {"words", "places"} if self.pipeline.first else set()
        own = {n: p for n, p in others.items() if (number == 0 if n in first else number == self.chunks - 1)}
        module = Chunked(*(self.model.layers[str(index)] for index in self.model.parts[number]), **own)
        return Chunk(module, lambda x, batch: self.part(number, x, batch), lambda: self.wait(number))

    def wait(self, chunk: int) -> None:
        """Wait for the weights of a chunk's layers."""
        for index in self.model.parts[chunk]:
            layer = self.model.layers[str(index)]
            for hook in layer._forward_pre_hooks.values():
                hook(layer, ())

    def rehearse(self) -> None:
        """All passes of a step and of an evaluation, alone."""
        mine = batches(0, self.layout)
        functions = [lambda x, batch, n=n: self.part(n, x, batch) for n in range(self.chunks)]
        with self.pipeline.rehearsing():
            self.step.forward_backward(mine, lambda part=None: None, lambda: None)
            with torch.no_grad():
                self.pipeline._forward(functions, mine)

    def warm_up(self) -> None:
        """As a run does where nothing is captured."""
        count = SAMPLES_OF_A_STEP // B // self.layout.size("dp")
        runner = StepRunner(self.step, self.model, count, capture=False)
        runner.warm_up(batches(0, self.layout)[:1])
        self.run = runner

    def in_graphs(self) -> PlayedGraphs:
        """Train by played graphs from now on; what has recorded them."""
        played = PlayedGraphs(self.model)
        runner = StepRunner(self.step, self.model, SAMPLES_OF_A_STEP // B // self.layout.size("dp"), recorder=played)
        runner.warm_up(batches(0, self.layout)[:1])
        self.run = runner
        return played

    def train(self, first: int, last: int) -> list[dict[str, float]]:
        """Metrics of the steps, as the trainer reads them."""
        read = []
        for step in range(first, last):
            result = self.run(batches(step, self.layout))
            read.append(dict(self.step.read(result.names, result.values.tolist()).metrics))
        return read

    def evaluate(self, count: int) -> float:
        """The mean loss over ``count`` micro-batches, by the forward pass alone."""
        counts = Counts(self.layout, ("rows",), ("loss",), axes=("pp", "dp"))
        self.step.materialize()
        weights = Weights(dict(self.model.named_parameters()))
        with evaluating(self.model, weights):
            mine = batches(99, self.layout, count)
            functions = [lambda x, batch, n=n: self.part(n, x, batch) for n in range(self.chunks)]
            for losses in self.pipeline.forward(functions, mine):
                assert not losses.total.requires_grad
                counts.add(torch.ones_like(losses.total), losses.total)
        totals = counts.totals()
        return totals["loss"] / totals["rows"]

    def weights(self) -> dict[str, Tensor]:
        self.step.materialize()
        return {name: parameter.detach().clone() for name, parameter in self.model.named_parameters()}

    def save(self, folder: Path) -> None:
        checkpoint.save(folder, Progress(SAVED_AFTER), 7, SETTINGS, self.model, (self.optimizer,), self.layout)

    def load(self, path: Path) -> None:
        checkpoint.restore(
            checkpoint.read(path, SETTINGS, self.layout), self.model, (self.optimizer,), self.layout
        )  # fmt: skip


def place_of(folder: str, name: str) -> Path:
    return Path(folder, name) / f"step_{SAVED_AFTER:08d}"


def one_after_the_other(trainee: Trainee) -> dict[str, float]:
    """The norm of each gradient after a rehearsal that every rank makes while others wait for its end."""
    for turn in range(dist.get_world_size()):
        if turn == dist.get_rank():
            trainee.rehearse()
        dist.barrier()
    named = trainee.model.named_parameters()
    return {name: parameter.grad.norm().item() for name, parameter in named if parameter.grad is not None}


def run_rank(rank: int, world: int, own_folder: str) -> dict[str, Any]:
    """Train, save, evaluate and resume what the layouts before have saved; ``single`` is of one rank."""
    folder = str(Path(own_folder).parent)
    found: dict[str, Any] = {}
    for name, (axes, chunks) in LAYOUTS[world].items():
        layout = Layout(axes, rank, seed=7)
        for shard in ("none", "all") if layout.size("dp") > 1 else ("none",):
            trainee = Trainee(layout, chunks, shard=shard)
            metrics = trainee.train(0, SAVED_AFTER)
            trainee.save(Path(folder, name))
            metrics += trainee.train(SAVED_AFTER, STEPS)
            case = name if shard == "none" else f"{name}, shards"
            found[case] = {"metrics": metrics, "weights": trainee.weights(), "evaluated": trainee.evaluate(6)}
            found[case]["alive"] = trainee.most_alive
            found[case]["reduced before the last chunk"] = trainee.reduced
            found[case]["rehearsed"] = one_after_the_other(Trainee(layout, chunks, shard=shard))
            warm = Trainee(layout, chunks, shard=shard)
            warm.warm_up()
            found[f"{case}, warm"] = {"metrics": warm.train(0, STEPS), "weights": warm.weights()}
            graphed = Trainee(layout, chunks, graphs=ChunkGraphs(), shard=shard)
            played = graphed.in_graphs()
            replayed = played.replays
            found[f"{case}, graphs"] = {"metrics": graphed.train(0, STEPS), "weights": graphed.weights()}
            found[f"{case}, graphs"]["recorded"] = played.recorded
            found[f"{case}, graphs"]["replays"] = played.replays - replayed
        for written in ("single", *(n for n in LAYOUTS[world])):
            if place_of(folder, written).exists():
                resumed = Trainee(layout, chunks)
                resumed.load(place_of(folder, written))
                resumed.train(SAVED_AFTER, STEPS)
                found[f"{written} to {name}"] = {"weights": resumed.weights()}
    return found
