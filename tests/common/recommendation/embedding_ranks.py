"""A small model over sharded embeddings on gloo ranks, and the same with PyTorch's own tables on one."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from common.data.batches import Batch
from common.distributed.layout import Layout
from common.errors import ConfigError
from common.ops.embedding_bags import AdagradRows, Rule, SgdRows
from common.optim.learning_rate import constant
from common.optim.momentum import SGD
from common.optim.optimizer import Optimizer, ParameterGroup
from common.optim.precision import LossScale
from common.optim.updater import SendingUpdater
from common.recommendation import row_files
from common.recommendation.embedding_updater import EmbeddingUpdater
from common.recommendation.embeddings import ShardedEmbeddings
from common.recommendation.placement import Hybrid, Placement, row_wise, table_wise
from common.recommendation.row_store import fill
from common.recommendation.tables import Table, Tables
from common.run import checkpoint
from common.run.checkpoint import Progress
from common.step.graphs import StepRunner
from common.step.train_step import Losses, TrainStep, accumulate

SEED, RATE, EPSILON, DENSE_RATE = 7, 0.125, 1e-8, 0.0625
# The rates have few digits: learning rates are fp32.
MICRO_BATCHES = 4  # micro-batches of an iteration, over all ranks
SAMPLES, DENSE, ITERATIONS = 3, 5, 3
TABLES = Tables(
    (Table("a", 11, 3), Table("b", 40, 1), Table("c", 3, 2), Table("d", 7, 6), Table("e", 25, 1), Table("f", 5, 4)), 4
)
RULES: dict[str, Rule] = {"adagrad": AdagradRows(EPSILON), "sgd": SgdRows()}


def plans(ranks: int) -> dict[str, Placement]:
    """Every placement, and mixtures; some with ranks that hold nothing."""
    mixtures: dict[int, dict[str, tuple[tuple[int, ...], ...]]] = {
        1: {"mixed": ((0,), (), (0,), (), (0,), (0,))},
        2: {"mixed": ((1, 0), (0,), (), (0, 1), (1,), ()), "one_rank": ((1,),) * 6},
        4: {
            "mixed": ((2, 3), (3, 0, 1, 2), (), (0, 1), (3,), ()),
            "node": ((0, 1), (2, 3), (0, 1), (2, 3), (), (1,)),
            "one_node": (*((2, 3),) * 5, (2,)),
        },
    }
    named = {"row_wise": row_wise(TABLES, ranks)}
    if ranks < 4:
        named |= {"table_wise": table_wise(TABLES, ranks), "replicated": Placement(TABLES, ranks, ((),) * 6)}
    named |= {name: Placement(TABLES, ranks, holders) for name, holders in mixtures[ranks].items()}
    return named | hybrids(ranks)


def hybrids(ranks: int) -> dict[str, Placement]:
    """Plans with hybrid tables: of some, no or all rows frequent; some beside tables of every other placement."""
    every = tuple(range(ranks))
    some = tuple(
        Hybrid(number, tuple(range(table.rows - 1, 0, -3)), every, table.rows, SAMPLES)
        for number, table in enumerate(TABLES.tables)
    )
    mixed = (
        Hybrid(0, (2, 0, 5), every[::-1], 9, SAMPLES),
        Hybrid(1, (), every[-1:], 3, 2),
        Hybrid(4, tuple(range(25)), every[:2], 1, 1),
    )
    return {
        "hybrid": Placement(TABLES, ranks, ((),) * 6, some),
        "hybrid_mixed": Placement(TABLES, ranks, ((), (), every, (every[-1],), (), ()), mixed),
    }


def micro_batch(iteration: int, number: int) -> dict[str, Tensor]:
    """A micro-batch: dense features, ids full of duplicates, and what the loss weighs the samples by."""
    generator = torch.Generator().manual_seed(1000 * iteration + number)
    ids = [
        torch.randint(0, max(2, table.rows // 2), (SAMPLES, table.hotness), generator=generator, dtype=torch.int32)
        for table in TABLES.tables
    ]
    dense = torch.randn(SAMPLES, DENSE, generator=generator, dtype=torch.float64)
    return {"dense_BD": dense, "ids_BL": torch.cat(ids, 1), "weight_B": torch.rand(SAMPLES, generator=generator) + 0.5}


EARLIER = {1: ("row_wise", "table_wise", "mixed", "hybrid_mixed"), 2: ("row_wise", "mixed", "hybrid")}
"""Plans whose checkpoints are resumed by so many ranks; twice as many wrote them."""


SEVERAL_CHUNKS = mock.patch.object(row_files, "CHUNK_BYTES", 100)
"""Three rows each."""


class Dense(nn.Module):
    """Bottom network and loss of a small model."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        width = (1 + len(TABLES)) * TABLES.width
        self.bottom = nn.Parameter(torch.randn(DENSE, TABLES.width, generator=generator, dtype=torch.float64).to(dtype))
        self.top = nn.Parameter(torch.randn(width, 3, generator=generator, dtype=torch.float64).to(dtype))

    def loss(self, x0_BX: Tensor, weight_B: Tensor) -> Tensor:
        """A mean over the samples that depends on x0 non-linearly."""
        return (torch.tanh(x0_BX @ self.top).square().sum(1) * weight_B).mean()


class Trainee:
    """The model, its embeddings, and a step that trains both."""

    def __init__(
        self,
        plan: Placement,
        layout: Layout,
        rule: Rule = RULES["adagrad"],
        dtype: torch.dtype = torch.float64,
        scale: float | None = None,
        early: bool = False,
        captured: bool = False,
        ranks_per_node: int | None = None,
        overlap: bool = True,
        peer_batch: int | None = None,
        dense: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.layout, self.early, self.dtype = layout, early, dtype
        rows = torch.float64 if dtype == torch.float64 else options.pop("rows_dtype", torch.float32)
        self.embeddings = ShardedEmbeddings(
            plan,
            layout,
            dtype=dtype,
            rows_dtype=rows,
            ranks_per_node=ranks_per_node,
            overlap=overlap,
            peer_batch=peer_batch,
        )
        self.model = Dense(dtype).to(layout.device)
        self.micro_batches = MICRO_BATCHES // layout.size("dp")
        loss_scale = LossScale(layout.device, scale) if scale is not None and dtype == torch.float16 else None
        optimizer = Optimizer(
            [ParameterGroup(dict(self.model.named_parameters()))],
            SGD(0.0),
            constant(DENSE_RATE),
            layout,
            grad_divisor=MICRO_BATCHES,
            loss_scale=loss_scale,
            **(dense or {}),
        )
        self.updater = EmbeddingUpdater(
            self.embeddings,
            rule,
            constant(RATE),
            grad_divisor=MICRO_BATCHES,
            micro_batches=self.micro_batches,
            loss_scale=loss_scale,
            **options,
        )
        self.step = TrainStep(accumulate(self.loss, loss_scale), [optimizer, self.updater], layout)
        self.runner = StepRunner(self.step, self.model, self.micro_batches, captured)
        if captured:
            self.runner.warm_up([self.batch(0, 0)])

    def batch(self, iteration: int, number: int, spoil: int | None = None) -> Batch:
        """A micro-batch on the device. ``spoil``: the number of one that is not finite."""
        tensors = micro_batch(iteration, number)
        if number == spoil:
            tensors["weight_B"] = tensors["weight_B"] * torch.inf
        return Batch({name: tensor.to(self.layout.device) for name, tensor in tensors.items()}, SAMPLES, 0)

    def loss(self, batch: Batch) -> Losses:
        """Forward pass of a micro-batch."""
        tensors = batch.tensors
        if self.early:
            self.embeddings.start(tensors["ids_BL"])
        bottom_BW = tensors["dense_BD"].to(self.dtype) @ self.model.bottom
        x0_BX = self.embeddings.forward(bottom_BW, tensors["ids_BL"])
        return Losses(self.model.loss(x0_BX, tensors["weight_B"].to(self.dtype)), {})

    def iterate(self, iteration: int, spoil: int | None = None) -> bool:
        """Run an iteration; return whether a gradient was not finite. ``spoil``: micro-batch with an infinite loss."""
        first = self.layout.index("dp") * self.micro_batches
        batches = [self.batch(iteration, number, spoil) for number in range(first, first + self.micro_batches)]
        with self.runner.on_stream():
            result = self.runner(batches)
        assert not self.runner.uncaptured
        return self.step.read(result.names, result.values.tolist()).overflow

    def everything(self) -> dict[str, Tensor]:
        """Copies of all that training changes."""
        tensors = {**dict(self.model.named_parameters()), **dict(self.updater.named_state())}
        return {name: tensor.detach().clone() for name, tensor in tensors.items()}

    def parts(self) -> dict[str, Any]:
        """The dense parameters, and this rank's rows and their state by table, shard and shards."""
        found: dict[str, Any] = {name: tensor.detach().clone() for name, tensor in self.model.named_parameters()}
        state = dict(self.updater.named_state())
        self.step.materialize()
        stores = {"rows": self.embeddings.store, "replicated_rows": self.embeddings.replicated}
        if self.embeddings.rare is not None:
            stores["rare_rows"] = self.embeddings.rare.store
        for name, store in stores.items():
            for number, shard in enumerate(store.shards):
                for kind in ("", ".state"):
                    if name + kind in state:
                        part = store.part(number, state[name + kind]).clone()
                        found[f"{shard.table}/{shard.shard}/{shard.shards}{kind}"] = part
            for number, hybrid in enumerate(store.frequent, len(store.shards)):
                for kind in ("", ".state"):
                    if name + kind in state:
                        part = store.part(number, state[name + kind]).clone()
                        found[f"frequent/{hybrid.table}{kind}"] = part
        return found


def train(plan: Placement, layout: Layout, iterations: int = ITERATIONS, **options: Any) -> dict[str, Any]:
    """Return the state after some iterations."""
    trainee = Trainee(plan, layout, **options)
    for iteration in range(iterations):
        trainee.iterate(iteration)
    trainee.runner.close()
    return trainee.parts()


def order(plan: Placement, layout: Layout) -> list[str]:
    """Return the operations of an iteration after the first gradient of a table, in order."""
    trainee, seen = Trainee(plan, layout, dense={"overlap": False}), []
    values = trainee.embeddings.replicated.rows_RW.numel()
    dense = sum(parameter.numel() for parameter in trainee.model.parameters())
    all_reduce, write = dist.all_reduce, trainee.updater.write

    def reduced(tensor: Tensor, *arguments: Any, **options: Any) -> Any:
        other = "dense gradients" if tensor.numel() >= dense else "result"
        seen.append("replicated rows" if tensor.numel() == values + 1 else other)
        return all_reduce(tensor, *arguments, **options)

    trainee.model.bottom.register_hook(lambda gradient: seen.append("bottom"))
    with mock.patch.object(dist, "all_reduce", reduced), mock.patch.object(trainee.updater, "write") as written:
        written.side_effect = lambda allowed: (seen.append("write"), write(allowed))
        trainee.iterate(0)
    return seen


def changed(plan: Placement, layout: Layout, spoil: int | None, skip: float) -> dict[str, Any]:
    """Return the changes of an iteration that is skipped or has a gradient that is not finite, and of the next one."""
    trainee = Trainee(plan, layout)
    trainee.iterate(0)
    before = trainee.everything()
    trainee.step.skip.fill_(skip)
    overflow = trainee.iterate(1, spoil)
    trainee.step.skip.fill_(0)
    now = trainee.everything()
    trainee.iterate(1)
    trainee.iterate(2)
    return {"changed": [n for n in now if not torch.equal(now[n], before[n])], "overflow": overflow} | trainee.parts()


def evaluated(plan: Placement, layout: Layout) -> dict[str, Tensor]:
    """x0 of a larger batch without gradients, with an id that no table has, and the initial rows."""
    embeddings = ShardedEmbeddings(plan, layout, dtype=torch.float64, rows_dtype=torch.float64)
    batches = [micro_batch(9, 2 * layout.index("dp") + number) for number in range(2)]
    ids_BL = torch.cat([batch["ids_BL"] for batch in batches])
    ids_BL[0, 0], ids_BL[1, 3] = -1, 40
    bottom_BW = torch.arange(len(ids_BL) * TABLES.width, dtype=torch.float64).view(len(ids_BL), -1)
    with torch.no_grad():
        return {"x0_BX": embeddings.forward(bottom_BW, ids_BL), "ids_BL": ids_BL, "bottom_BW": bottom_BW}


def silenced(plan: Placement, layout: Layout) -> tuple[list[int], list[int]]:
    """Elements of each all-reduce of an iteration, and of one in which no gradients of replicated rows are sent."""
    trainee = Trainee(plan, layout)
    found: tuple[list[int], list[int]] = [], []
    for iteration, sizes in enumerate(found):
        with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as counted:
            trainee.iterate(iteration)
        sizes += [call.args[0].numel() for call in counted.call_args_list]
        for updater in trainee.step.updaters:
            assert isinstance(updater, SendingUpdater)
            updater.stop_sending()
    return found


CROWDED = 2
"""The micro-batch whose samples have different ids of the table b, where all others have the same id."""


def crowded(number: int) -> dict[str, Tensor]:
    """A micro-batch, or the one that has three different ids of the table b."""
    tensors = micro_batch(0, number)
    column = TABLES.columns[1]
    tensors["ids_BL"][:, column] = torch.arange(SAMPLES) + 7 if number == CROWDED else 7
    return tensors


def few_slots(ranks: int, slots: int) -> Placement:
    """The table b hybrid, on one rank, with so many slots."""
    every = tuple(range(ranks))
    hybrids = (Hybrid(0, (1, 4), every, 9, SAMPLES), Hybrid(1, (), every[-1:], slots, SAMPLES))
    return Placement(TABLES, ranks, ((), (), every, every, (), ()), hybrids)


def overflown(layout: Layout, slots: int) -> dict[str, Any]:
    """Return the effects of an iteration with a crowded micro-batch on a rank, and the result of its evaluation."""
    trainee = Trainee(few_slots(layout.world_size, slots), layout)
    before = trainee.everything()
    first = layout.index("dp") * trainee.micro_batches
    batches = [Batch(crowded(number), SAMPLES, 0) for number in range(first, first + trainee.micro_batches)]
    result = trainee.runner(batches)
    now = trainee.everything()
    found: dict[str, Any] = {"changed": [name for name in now if not torch.equal(now[name], before[name])]}
    found["training"] = found["evaluation"] = found["again"] = ""
    try:
        found["metrics"] = list(trainee.step.read(result.names, result.values.tolist()).metrics)
    except ConfigError as error:
        found["training"] = str(error)
    bottom_BW = torch.zeros(SAMPLES, TABLES.width, dtype=torch.float64)
    for case, numbers in (
        ("evaluation", range(first, first + trainee.micro_batches)),
        ("again", [0] * trainee.micro_batches),
    ):
        try:
            with torch.no_grad(), trainee.embeddings.checked():
                for number in numbers:
                    trainee.embeddings.forward(bottom_BW, crowded(number)["ids_BL"])
        except ConfigError as error:
            found[case] = str(error)
    return found


def save(plan: Placement, layout: Layout, folder: Path) -> dict[str, Any]:
    """A checkpoint after two iterations, and what is in it."""
    trainee = Trainee(plan, layout)
    for iteration in range(2):
        trainee.iterate(iteration)
    with SEVERAL_CHUNKS:
        checkpoint.save(folder, Progress(2, 0, 2), SEED, {}, trainee.model, trainee.step.updaters, layout)
    return trainee.parts()


def resume(plan: Placement, layout: Layout, place: Path) -> dict[str, Any]:
    """Return the state restored from a checkpoint, and under ``then`` that after the next iteration."""
    trainee = Trainee(plan, layout)
    trainee.iterate(8)  # what was there before must not matter
    content = checkpoint.read(place, {}, layout)
    with SEVERAL_CHUNKS:
        progress = checkpoint.restore(content, trainee.model, trainee.step.updaters, layout)
    restored = trainee.parts() | {"step": dict(trainee.updater.named_state())["step"].clone()}
    trainee.iterate(progress.step)
    return restored | {"then": trainee.parts()}


def run_rank(rank: int, folder: str) -> None:
    """Return all results of one of four ranks; the first two also run as two ranks."""
    torch.set_num_threads(1)
    for world in (4, 2):
        if rank < world:
            own = Path(folder, str(world))
            dist.init_process_group("gloo", init_method=f"file://{own}/store", rank=rank, world_size=world)
            torch.save(cases(Layout({"dp": world}, rank, seed=SEED), own), own / f"{rank}.pt")
            dist.barrier()
            dist.destroy_process_group()


def cases(layout: Layout, folder: Path) -> dict[str, Any]:
    """All cases on the ranks of ``layout``; two ranks resume what four have saved, and one what two have."""
    ranks = layout.world_size
    found: dict[str, Any] = {}
    for name, plan in plans(ranks).items():
        found[f"adagrad/{name}"] = train(plan, layout)
        found[f"evaluated/{name}"] = evaluated(plan, layout)
        if ranks < 4:
            found[f"saved/{name}"] = save(plan, layout, folder / name)
            for earlier in EARLIER[ranks]:
                place = folder.parent / str(2 * ranks) / earlier / "step_00000002"
                found[f"resumed/{earlier}/{name}"] = resume(plan, layout, place)
    mixed = plans(ranks)["mixed"]
    if ranks == 4:
        found |= {f"nodes/{name}": train(plan, layout, ranks_per_node=2) for name, plan in plans(4).items()}
        found |= {f"saved/{name}": save(plan, layout, folder / name) for name, plan in plans(ranks).items()}
    found["sgd/mixed"] = train(mixed, layout, rule=RULES["sgd"])
    found["early"] = train(mixed, layout, early=True)
    found["silenced"] = silenced(mixed, layout)
    found["reduced/after"] = train(mixed, layout, dense={"overlap": False})
    found["reduced/in_buckets"] = train(mixed, layout, dense={"bucket_bytes": 64})
    found["order"] = order(mixed, layout)
    if ranks < 4:
        found["fp16"] = train(mixed, layout, rule=RULES["sgd"], dtype=torch.float16, scale=64.0)
        found["bf16"] = train(mixed, layout, rule=RULES["sgd"], dtype=torch.bfloat16)
        by_chance = {"rows_dtype": torch.float16, "stochastic_rounding": True}
        found["fp16_rows"] = train(mixed, layout, rule=RULES["sgd"], dtype=torch.float32, **by_chance)
    for spoiled in range(0, MICRO_BATCHES, 3):
        found[f"overflow/{spoiled}"] = changed(mixed, layout, spoiled, 0.0)
    found["skipped"] = changed(mixed, layout, None, 1.0)
    if ranks > 1:
        hybrid = plans(ranks)["hybrid_mixed"]
        found["hybrid/early"] = train(hybrid, layout, early=True)
        found["hybrid/skipped"] = changed(hybrid, layout, None, 1.0)
        found |= {
            f"hybrid/overflow/{spoiled}": changed(hybrid, layout, spoiled, 0.0) for spoiled in range(MICRO_BATCHES)
        }
        by_chance = {"rows_dtype": torch.float16, "stochastic_rounding": True}
        found["hybrid/fp16"] = train(hybrid, layout, rule=RULES["sgd"], dtype=torch.float16, scale=64.0)
        found["hybrid/fp16_rows"] = train(hybrid, layout, rule=RULES["sgd"], dtype=torch.float32, **by_chance)
        found |= {f"slots/{slots}": overflown(layout, slots) for slots in (2, 3)}
    return found


@dataclasses.dataclass(frozen=True)
class Reference:
    """Return the final rows of PyTorch's own tables."""

    rows: list[Tensor]
    states: list[Tensor]
    dense: dict[str, Tensor]


def reference(rule: str = "adagrad", iterations: int = ITERATIONS) -> Reference:
    """The same training with ``nn.EmbeddingBag`` and ``torch.optim`` in float64 on one rank."""
    seed = Layout(seed=SEED).shared_generator("embedding tables").initial_seed()
    bags = nn.ModuleList()
    for number, table in enumerate(TABLES.tables):
        rows = torch.empty(table.rows, TABLES.width, dtype=torch.float64)
        fill(rows, number, table.rows, seed)
        bags.append(nn.EmbeddingBag.from_pretrained(rows, freeze=False, mode="sum"))
    dense = Dense(torch.float64)
    of_rows: torch.optim.Optimizer = torch.optim.SGD(bags.parameters(), lr=RATE)
    if rule == "adagrad":
        of_rows = torch.optim.Adagrad(bags.parameters(), lr=RATE, eps=EPSILON)
    optimizers = [of_rows, torch.optim.SGD(dense.parameters(), lr=DENSE_RATE)]
    for iteration in range(iterations):
        losses = []
        for number in range(MICRO_BATCHES):
            tensors = micro_batch(iteration, number)
            hotness = [table.hotness for table in TABLES.tables]
            columns = tensors["ids_BL"].long().split(hotness, 1)
            vectors = [bag(ids) for bag, ids in zip(bags, columns, strict=True)]
            x0_BX = torch.cat([tensors["dense_BD"] @ dense.bottom, *vectors], 1)
            losses.append(dense.loss(x0_BX, tensors["weight_B"].double()))
        for optimizer in optimizers:
            optimizer.zero_grad()
        torch.stack(losses).mean().backward()
        for optimizer in optimizers:
            optimizer.step()
    states = [of_rows.state[bag.weight]["sum"] for bag in bags] if rule == "adagrad" else []
    return Reference(
        [bag.weight.detach() for bag in bags], states, {n: p.detach() for n, p in dense.named_parameters()}
    )
