"""Embeddings sharded over one, two and four gloo ranks train like PyTorch's own tables on one."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from embedding_ranks import (
    EARLIER,
    MICRO_BATCHES,
    SEED,
    TABLES,
    Reference,
    Trainee,
    cases,
    micro_batch,
    plans,
    reference,
    run_rank,
)
from torch import Tensor

from common.distributed.layout import Layout
from common.errors import CheckpointError, ConfigError
from common.recommendation import exchange, exchange_over_nodes, rare_rows
from common.recommendation.embedding_updater import not_finite
from common.recommendation.embeddings import ShardedEmbeddings
from common.recommendation.exchange_over_nodes import pays
from common.recommendation.placement import Placement, row_wise
from common.recommendation.tables import Table, Tables
from common.run import checkpoint
from tests.capturable import Capturable

TOLERANCE = 1e-12  # of float64 sums in another order
WORLDS = (1, 2, 4)
CASES = [(ranks, name) for ranks in WORLDS for name in plans(ranks)]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder to which four ranks, then two, then this process have written what they found."""
    folder: Path = tmp_path_factory.mktemp("worlds")
    for ranks in WORLDS:
        (folder / str(ranks)).mkdir()
    mp.start_processes(run_rank, args=(str(folder),), nprocs=max(WORLDS), start_method="forkserver")
    torch.save(cases(Layout(seed=SEED), folder / "1"), folder / "1" / "0.pt")
    return folder


@pytest.fixture(scope="module")
def found(root: Path) -> dict[int, list[dict[str, Any]]]:
    """Number of ranks to what each of them found, by case."""
    return {ranks: [torch.load(root / str(ranks) / f"{rank}.pt") for rank in range(ranks)] for ranks in WORLDS}


@pytest.fixture(scope="module")
def expected() -> dict[str, Reference]:
    """Final rows of PyTorch's tables, by rule."""
    return {rule: reference(rule) for rule in ("adagrad", "sgd")}


def whole(ranks: list[dict[str, Any]], kind: str = "") -> list[Tensor]:
    """Tables put together of what the ranks have of them; what several have must be the same."""
    tables = []
    for number, table in enumerate(TABLES.tables):
        rows = torch.full((table.rows, TABLES.width), torch.nan, dtype=torch.float64)
        for parts in ranks:
            for name, part in parts.items():
                place, _, suffix = name.partition(".")
                if place.startswith(f"{number}/") and suffix == kind:
                    shard, shards = (int(text) for text in place.split("/")[1:])
                    before = rows[shard::shards]
                    assert before.isnan().all() or torch.equal(before, part.double())
                    rows[shard::shards] = part.double()
        tables.append(rows)
    return tables


def difference(tables: list[Tensor], expected: list[Tensor]) -> float:
    """The largest difference of an element."""
    return max(float((table - other).abs().max()) for table, other in zip(tables, expected, strict=True))


@pytest.mark.parametrize(("ranks", "name"), CASES)
def test_every_placement_trains_as_tables_of_pytorch(found, expected, ranks, name):
    results = [rank[f"adagrad/{name}"] for rank in found[ranks]]
    assert difference(whole(results), expected["adagrad"].rows) < TOLERANCE
    assert difference(whole(results, "state"), expected["adagrad"].states) < TOLERANCE
    for rank in results:
        for parameter, value in expected["adagrad"].dense.items():
            torch.testing.assert_close(rank[parameter], value, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("name", plans(4))
def test_an_exchange_in_nodes_first_trains_as_tables_of_pytorch(found, expected, name):
    results = [rank[f"nodes/{name}"] for rank in found[4]]
    assert difference(whole(results), expected["adagrad"].rows) < TOLERANCE
    assert difference(whole(results, "state"), expected["adagrad"].states) < TOLERANCE


def test_an_exchange_in_nodes_first_is_for_tables_with_several_shards_on_a_node():
    assert all(pays(plan, 2) for name, plan in plans(4).items() if name != "hybrid")
    assert not pays(plans(4)["hybrid"], 2)  # rare rows take one step
    assert not any(pays(plan, size) for plan in plans(4).values() for size in (1, 3, 4))
    assert not pays(Placement(TABLES, 4, ((0, 2), (3,), (), (1, 3), (2,), ())), 2)


@pytest.mark.parametrize("ranks", WORLDS)
def test_sgd_trains_as_that_of_pytorch(found, expected, ranks):
    assert difference(whole([rank["sgd/mixed"] for rank in found[ranks]]), expected["sgd"].rows) < TOLERANCE


@pytest.mark.parametrize("ranks", WORLDS)
def test_lookups_that_are_started_early_change_nothing(found, ranks):
    for rank in found[ranks]:
        for name, value in rank["adagrad/mixed"].items():
            assert torch.equal(rank["early"][name], value)


@pytest.mark.parametrize(  # four ranks add in an order that depends on the bucket
    ("ranks", "name"), [(1, "after"), (2, "after"), (4, "after"), (1, "in_buckets"), (2, "in_buckets")]
)
def test_dense_gradients_are_reduced_at_any_time_and_in_any_buckets_with_the_same_bits(found, ranks, name):
    for rank in found[ranks]:
        for of, value in rank["adagrad/mixed"].items():
            assert torch.equal(rank[f"reduced/{name}"][of], value), of


@pytest.mark.parametrize("ranks", WORLDS)
def test_only_dense_gradients_are_reduced_between_the_backward_pass_and_the_update(found, ranks):
    micro_batches = MICRO_BATCHES // ranks
    backward = ["bottom"] * (micro_batches - 1) + (["replicated rows"] if ranks > 1 else []) + ["bottom"]
    after = ["dense gradients", "result", "write"] if ranks > 1 else ["write"]
    for rank in found[ranks]:
        assert rank["order"] == [*backward, *after]


HALF = {"fp16": 0.03, "bf16": 0.05, "fp16_rows": 0.1}
"""Largest relative error with half-precision vectors or rows."""


@pytest.mark.parametrize(
    ("ranks", "name", "bound"),
    [
        *((ranks, name, bound) for ranks in (1, 2) for name, bound in HALF.items()),
        *((ranks, f"hybrid/{name}", HALF[name]) for ranks in WORLDS[1:] for name in ("fp16", "fp16_rows")),
    ],
)
def test_half_vectors_and_rows_train_nearly_alike(found, expected, ranks, name, bound):
    start, results = reference(iterations=0).rows, whole([rank[name] for rank in found[ranks]])
    end = expected["sgd"].rows
    errors = sum(float((rows - other).norm()) for rows, other in zip(results, end, strict=True))
    moved = sum(float((other - rows).norm()) for rows, other in zip(start, end, strict=True))
    assert 0 < errors < bound * moved


@pytest.mark.parametrize(("ranks", "name"), CASES)
def test_evaluation_sums_rows_of_ids_in_range(found, ranks, name):
    tables = reference(iterations=0).rows
    for rank in found[ranks]:
        result = rank[f"evaluated/{name}"]
        rows: list[Tensor] = []
        for sample in result["ids_BL"].tolist():
            sums, first = [], 0
            for table, values in zip(TABLES.tables, tables, strict=True):
                ids = sample[first : first + table.hotness]
                sums.append(sum((values[i] for i in ids if 0 <= i < table.rows), torch.zeros(TABLES.width)))
                first += table.hotness
            rows.append(torch.cat(sums))
        expected_BX = torch.cat([result["bottom_BW"], torch.stack(rows)], 1)
        torch.testing.assert_close(result["x0_BX"], expected_BX, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("ranks", WORLDS)
@pytest.mark.parametrize("spoiled", range(0, MICRO_BATCHES, 3))
def test_a_gradient_that_is_not_finite_keeps_all_ranks_from_writing(found, expected, ranks, spoiled):
    results = [rank[f"overflow/{spoiled}"] for rank in found[ranks]]
    assert [result["overflow"] for result in results] == [True] * ranks
    assert [result["changed"] for result in results] == [[]] * ranks
    assert difference(whole(results), expected["adagrad"].rows) < TOLERANCE


@pytest.mark.parametrize("ranks", WORLDS[1:])
def test_a_silenced_iteration_sums_no_gradients_but_flags_and_its_result(found, ranks):
    holders = zip(TABLES.tables, plans(ranks)["mixed"].holders, strict=True)
    replicated = sum(table.rows for table, ranks_of_it in holders if not ranks_of_it) * TABLES.width
    for rank in found[ranks]:
        usual, silent = rank["silenced"]
        assert replicated + 1 in usual
        assert sum(size > replicated + 1 for size in usual) == 1  # the dense gradients
        assert len(silent) == len(usual) - 1
        assert max(silent) < replicated


@pytest.mark.parametrize("ranks", WORLDS)
def test_a_skipped_iteration_leaves_no_trace(found, expected, ranks):
    results = [rank["skipped"] for rank in found[ranks]]
    assert [result["changed"] for result in results] == [[]] * ranks
    assert difference(whole(results), expected["adagrad"].rows) < TOLERANCE


@pytest.mark.parametrize("ranks", WORLDS[1:])
@pytest.mark.parametrize("name", ["hybrid", "hybrid_mixed"])
def test_all_ranks_have_the_same_frequent_rows(found, expected, ranks, name):
    for hybrid in plans(ranks)[name].with_frequent:
        for kind, tables in (("", expected["adagrad"].rows), (".state", expected["adagrad"].states)):
            kept = [rank[f"adagrad/{name}"][f"frequent/{hybrid.table}{kind}"] for rank in found[ranks]]
            assert all(torch.equal(rows, kept[0]) for rows in kept)
            rows = tables[hybrid.table][list(hybrid.frequent)]
            torch.testing.assert_close(kept[0], rows, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("ranks", WORLDS[1:])
def test_hybrid_tables_decide_with_all_ranks_and_leave_no_trace(found, expected, ranks):
    for spoiled in range(MICRO_BATCHES):
        results = [rank[f"hybrid/overflow/{spoiled}"] for rank in found[ranks]]
        assert [(result["overflow"], result["changed"]) for result in results] == [(True, [])] * ranks
        assert difference(whole(results), expected["adagrad"].rows) < TOLERANCE
    results = [rank["hybrid/skipped"] for rank in found[ranks]]
    assert [(result["overflow"], result["changed"]) for result in results] == [(False, [])] * ranks
    assert difference(whole(results), expected["adagrad"].rows) < TOLERANCE


@pytest.mark.parametrize("ranks", WORLDS[1:])
def test_too_few_slots_write_nothing_and_end_the_run_on_all_ranks(found, ranks):
    for rank in found[ranks]:
        result = rank["slots/2"]
        assert result["changed"] == []
        for case in ("training", "evaluation"):
            assert "rows in a shard of table 'b' than its 2 slots for 3 samples; nothing was written" in result[case]
        assert result["again"] == ""  # an evaluation counts its own


@pytest.mark.parametrize("ranks", WORLDS[1:])
def test_just_enough_slots_are_enough(found, ranks):
    for rank in found[ranks]:
        result = rank["slots/3"]
        assert (result["training"], result["evaluation"]) == ("", "")
        assert {"step", "bottom", "top"} <= set(result["changed"])
        assert not [name for name in result["metrics"] if "slots" in name]
    assert any("rare_rows" in rank["slots/3"]["changed"] for rank in found[ranks])


@pytest.mark.parametrize("ranks", WORLDS[1:])
def test_rare_rows_that_are_asked_for_early_change_nothing(found, ranks):
    for rank in found[ranks]:
        for name, value in rank["adagrad/hybrid_mixed"].items():
            assert torch.equal(rank["hybrid/early"][name], value)


@pytest.mark.parametrize(
    ("ranks", "name", "earlier"),
    [(ranks, name, earlier) for ranks, name in CASES if ranks < 4 for earlier in EARLIER[ranks]],
)
def test_checkpoints_load_under_any_plan_and_number_of_ranks(found, expected, ranks, name, earlier):
    saved = [rank[f"saved/{earlier}"] for rank in found[2 * ranks]]
    resumed = [rank[f"resumed/{earlier}/{name}"] for rank in found[ranks]]
    for kind in ("", "state"):
        for restored, written in zip(whole(resumed, kind), whole(saved, kind), strict=True):
            assert torch.equal(restored, written)
    assert all(rank["step"] == 2 for rank in resumed)
    then = [rank["then"] for rank in resumed]
    assert difference(whole(then), expected["adagrad"].rows) < TOLERANCE


def edited(root: Path, tmp_path: Path, file: str, change: Any) -> Path:
    """A copy of the checkpoint that this process wrote, of which ``change`` made other bytes."""
    place = tmp_path / "step_00000002"
    (place / "updater_1").mkdir(parents=True)
    for path in (root / "1" / "mixed" / "step_00000002").rglob("*.*"):
        target = place / path.relative_to(root / "1" / "mixed" / "step_00000002")
        target.write_bytes(change(path.read_bytes()) if path.name == file else path.read_bytes())
    return place


def loaded(place: Path, tables: Tables = TABLES, **options: Any) -> None:
    layout = Layout(seed=SEED)
    trainee = Trainee(row_wise(tables, 1), layout, **options)
    content = checkpoint.read(place, {}, layout)
    checkpoint.restore(content, trainee.model, trainee.step.updaters, layout)


def test_a_checkpoint_of_other_tables_is_refused(root):
    place = root / "1" / "mixed" / "step_00000002"
    loaded(place)
    for rows, name, message in (
        (12, "a", "11 rows of 'a', this run has 12"),
        (11, "z", "no such table of 'z', this run has 11"),
    ):
        other = Tables((Table(name, rows, 3), *TABLES.tables[1:]), TABLES.width)
        with pytest.raises(CheckpointError, match=message):
            loaded(place, other)
    with pytest.raises(CheckpointError, match=r"rows of 4 elements in torch.float64, this run has 4 in torch.float32"):
        loaded(place, dtype=torch.float32)


def test_damaged_rows_are_refused(root, tmp_path):
    nan = b"\xff" * 8
    changes = {
        "shorter": ("rows_0.bin", lambda content: content[:-1], "bytes of .*: the file is damaged"),
        "not finite": (
            "rows_0.bin",
            lambda content: content[:64] + nan + content[72:],
            "rows of table 'a' with numbers",
        ),
        "state": ("rows_0.bin", lambda content: content[:-8] + nan, "state of table 'f' with numbers"),
        "head": ("rows_0.json", lambda content: content[:50], "unreadable"),
        "shard": ("rows_0.json", lambda content: content.replace(b'"shards": 1', b'"shards": 2'), "incomplete"),
    }
    for name, (file, change, message) in changes.items():
        with pytest.raises(CheckpointError, match=message):
            loaded(edited(root, tmp_path / name, file, change))


def test_plans_of_other_ranks_are_refused():
    with pytest.raises(ConfigError, match="plan: of 2 ranks, for a layout of"):
        ShardedEmbeddings(row_wise(TABLES, 2), Layout(), dtype=torch.float32)


def test_a_bottom_without_gradient_is_refused():
    trainee = Trainee(Placement(TABLES, 1, ((),) * 6), Layout(seed=SEED))
    with pytest.raises(ValueError, match="bottom_BW has no gradient"):
        trainee.embeddings.forward(torch.zeros(3, TABLES.width, dtype=torch.float64), micro_batch(0, 0)["ids_BL"])


def test_another_number_of_micro_batches_is_refused():
    trainee = Trainee(row_wise(TABLES, 1), Layout(seed=SEED))
    trainee.micro_batches = MICRO_BATCHES - 1
    with pytest.raises(RuntimeError, match="3 forward and 3 backward passes came to the embeddings, 4 micro-batches"):
        trainee.iterate(0)


@pytest.mark.parametrize(
    ("ranks", "ranks_per_node", "name"),
    [(1, None, "mixed"), (4, None, "mixed"), (4, 2, "mixed"), (4, None, "hybrid_mixed"), (4, 2, "hybrid_mixed")],
)
def test_the_iteration_can_be_captured(monkeypatch, ranks, ranks_per_node, name):
    """With the collectives replaced: the sizes of what ranks send each other follow from no values."""
    layout = Layout({"dp": ranks}, ranks - 1, seed=SEED)
    monkeypatch.setattr(Layout, "_build", lambda self, families, axes, purpose="": None)
    trainee = Trainee(
        plans(ranks)[name], layout, scale=64.0, dtype=torch.float16, early=True, ranks_per_node=ranks_per_node
    )
    for module in (exchange, exchange_over_nodes, rare_rows):
        monkeypatch.setattr(module, "all_to_all", lambda received, sent, *counts: received.zero_())
    monkeypatch.setattr(dist, "all_gather_into_tensor", lambda received, sent, group: received.zero_())
    trainee.iterate(0)
    batches = [trainee.batch(1, number) for number in range(trainee.micro_batches)]
    with Capturable():
        for batch in batches:
            trainee.loss(batch).total.backward()
        overflow = trainee.updater.measure()
        trainee.updater.write(~overflow)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_every_number_that_is_not_finite_is_seen(dtype, value):
    values = torch.full((5, 3, 4), torch.finfo(dtype).max, dtype=dtype)
    assert not not_finite(values[:, 1:])
    values[4, 1, 2] = value
    assert not_finite(values[:, 1:])
    assert not not_finite(values[:, :1])
    assert not not_finite(values[:, :0])
