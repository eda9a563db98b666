"""Hybrid plans: measured on batches, checked, and written; and what they send."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from benchmarks.dlrm.data import FORMAT
from benchmarks.dlrm.workload import Dlrm
from common.data import manifest
from common.data.manifest import Manifest
from common.distributed.layout import Layout
from common.errors import ConfigError
from common.ops.embedding_bags import SgdRows
from common.optim.learning_rate import constant
from common.recommendation import exchange, hybrid_planning, plan_file, rare_rows
from common.recommendation.embedding_updater import EmbeddingUpdater
from common.recommendation.embeddings import ShardedEmbeddings
from common.recommendation.hybrid_planning import hybrid_plan, most_frequent
from common.recommendation.placement import Hybrid, Placement, row_wise, table_wise
from common.recommendation.planner import PlannerSettings, make_plan
from common.recommendation.tables import Table, Tables, synthetic_ids

TABLES = Tables((Table("a", 900, 1), Table("b", 50, 2), Table("c", 3000, 3)), 16)
RANKS, BATCH = 4, 64


def skewed(count: int = 6, batch: int = BATCH) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [synthetic_ids(TABLES, batch, "zipf", generator) for _ in range(count)]


def counted(batches: list[torch.Tensor], number: int) -> Counter[int]:
    first = sum(table.hotness for table in TABLES.tables[:number])
    columns = range(first, first + TABLES.tables[number].hotness)
    return Counter(row[column] for ids_BL in batches for row in ids_BL.tolist() for column in columns)


@pytest.mark.parametrize("frequent", [0, 1, 37, 10_000])
def test_the_most_frequent_rows_of_all_tables_together_are_chosen(frequent):
    batches = skewed()
    numbers = [0, 2]
    counts = {(place, key): n for place, number in enumerate(numbers) for key, n in counted(batches, number).items()}
    order = sorted(counts, key=lambda entry: (-counts[entry], entry))[:frequent]
    found = most_frequent(batches, TABLES, numbers, frequent)
    assert [ids.tolist() for ids in found] == [[key for place, key in order if place == n] for n in range(2)]


def test_slots_are_the_most_different_rare_rows_and_ten_deviations():
    batches = skewed()
    plan = hybrid_plan(row_wise(TABLES, RANKS), batches, 30, ["a", "c"])
    assert [hybrid.table for hybrid in plan.hybrids] == [0, 2]
    assert plan.holders == ((), (0, 1, 2, 3), ())
    assert sum(len(hybrid.frequent) for hybrid in plan.hybrids) == 30
    for hybrid in plan.hybrids:
        most = 0
        for ids_BL in batches:
            rare = set(counted([ids_BL], hybrid.table)) - set(hybrid.frequent)
            most = max(most, *(sum(key % RANKS == shard for key in rare) for shard in range(RANKS)))
        assert hybrid.samples == BATCH
        assert most + 10 * most**0.5 <= hybrid.slots < most + 10 * most**0.5 + 1


def test_tables_stay_as_they_are_where_slots_would_send_no_less():
    batches = skewed(batch=512)
    plan = hybrid_plan(table_wise(TABLES, RANKS), batches, 0)
    assert plan.hybrids == (Hybrid(1, (), (0, 1, 2, 3), 13, 512),)  # all rows of b are fewer than samples
    assert plan.holders == (table_wise(TABLES, RANKS).holders[0], (), table_wise(TABLES, RANKS).holders[2])
    plan = hybrid_plan(row_wise(TABLES, RANKS), batches, 600)
    assert {TABLES.tables[hybrid.table].name for hybrid in plan.hybrids} == {"a", "b", "c"}
    for hybrid in plan.hybrids:
        assert hybrid.slots * RANKS / hybrid.samples < RANKS


def test_what_cannot_be_measured_is_named():
    with pytest.raises(ConfigError, match="there is no table 'z'"):
        hybrid_plan(row_wise(TABLES, RANKS), skewed(), 5, ["a", "z"])
    with pytest.raises(ConfigError, match=r"batches of \[63, 64\] samples"):
        hybrid_plan(row_wise(TABLES, RANKS), [*skewed(1), *skewed(1, 63)], 5)
    with pytest.raises(ConfigError, match=r"batches of \[\] samples"):
        hybrid_plan(row_wise(TABLES, RANKS), [], 5)
    with pytest.raises(ConfigError, match="the plan has hybrid tables already"):
        hybrid_plan(hybrid_plan(row_wise(TABLES, RANKS), skewed(), 5, ["a"]), skewed(), 5)


def sent_bytes(plan: Placement, ids_BL: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> int:
    """Return the bytes that rank 0 sends in a step; they depend only on plan and batch."""
    sent: list[int] = []

    def counting(received: torch.Tensor, pieces: torch.Tensor, *counts: Any) -> None:
        sent.append(pieces.numel() * pieces.itemsize)
        received.zero_()

    with monkeypatch.context() as patched:
        patched.setattr(Layout, "_build", lambda self, families, axes, purpose="": None)
        patched.setattr(Layout, "group", lambda self, *axes: object())
        for module in (exchange, rare_rows):
            patched.setattr(module, "all_to_all", counting)
        # A ring's all-reduce sends almost twice what is reduced.
        patched.setattr(dist, "all_reduce", lambda values, group: sent.append(2 * values.numel() * values.itemsize))
        layout = Layout({"dp": RANKS}, 0, seed=1)
        embeddings = ShardedEmbeddings(plan, layout, dtype=torch.float16)
        updater = EmbeddingUpdater(embeddings, SgdRows(), constant(0.5), grad_divisor=RANKS)
        bottom_BW = torch.zeros(len(ids_BL), TABLES.width, dtype=torch.float16, requires_grad=True)
        embeddings.forward(bottom_BW, ids_BL).sum().backward()
        assert not updater.measure()  # neither too few slots nor numbers that are not finite
        updater.write(torch.tensor(True))
    return sum(sent)


def test_a_hybrid_plan_sends_fewer_bytes_of_skewed_ids_than_a_row_wise_one(monkeypatch):
    batches = skewed(6, 512)
    row_bytes = sent_bytes(row_wise(TABLES, RANKS), batches[0], monkeypatch)
    ids, vectors = TABLES.lookups * RANKS * 4, 3 * RANKS * TABLES.width * 2
    assert row_bytes == 512 * (ids + 2 * vectors) + 2 * 4  # and one flag is reduced
    hybrid = hybrid_plan(row_wise(TABLES, RANKS), batches, 100)
    assert len(hybrid.hybrids) == 3
    slots = sum(
        entry.capacity(shard, 512, TABLES)
        for entry in hybrid.hybrids
        for rank in range(RANKS)
        for shard in hybrid.rare_shards_of(rank)
        if shard.table == entry.table
    )
    own = sum(  # what rank 0 sends the others of its shards
        entry.capacity(shard, 512, TABLES)
        for entry, shard in zip(hybrid.hybrids, hybrid.rare_shards_of(0), strict=True)
    )
    expected = slots * 4 + own * RANKS * TABLES.width * 2 + slots * TABLES.width * 2
    reduced = 2 * 4 * (100 * TABLES.width + 1 + 3)
    hybrid_bytes = sent_bytes(hybrid, batches[0], monkeypatch)
    assert hybrid_bytes == expected + reduced
    assert hybrid_bytes < row_bytes / 3


def test_a_hybrid_plan_comes_back_from_its_files(tmp_path):
    plan = hybrid_plan(row_wise(TABLES, RANKS), skewed(), 30, ["a", "c"])
    plan_file.write(plan, tmp_path / "plan.yaml")
    assert {path.name for path in tmp_path.iterdir()} == {"plan.yaml", "plan_a.npy", "plan_c.npy"}
    assert make_plan(TABLES, str(tmp_path / "plan.yaml"), RANKS, 2, 64, PlannerSettings()) == plan
    assert plan_file.from_text(plan_file.to_text(plan), "text", TABLES, RANKS) == plan


A = "{ranks: 2, tables: {b: [1], c: replicated, a: {hybrid: %s}}}"


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("{shards: [0]}", "hybrid table 'a' has the keys frequent_rows, shards, slots, samples"),
        ("{frequent_rows: [1], shards: [0], slots: many, samples: 1}", "slots and samples of hybrid table 'a'"),
        ("{frequent_rows: 5, shards: [0], slots: 1, samples: 1}", "frequent_rows of hybrid table 'a' are a list"),
        ("{frequent_rows: none.npy, shards: [0], slots: 1, samples: 1}", "none.npy is unreadable"),
        ("{frequent_rows: floats.npy, shards: [0], slots: 1, samples: 1}", "floats.npy has no list of integers"),
        ("{frequent_rows: [1], shards: replicated, slots: 1, samples: 1}", "shards of hybrid table 'a' are a list"),
        ("{frequent_rows: [1], shards: [], slots: 1, samples: 1}", "table 'a' is 'replicated', a list of ranks"),
        ("{frequent_rows: [1], shards: [0, 0], slots: 1, samples: 1}", "table 'a' has two shards on one rank"),
        ("{frequent_rows: [1], shards: [2], slots: 1, samples: 1}", "table 'a' is on rank 2 of 2 ranks"),
        ("{frequent_rows: [1, 1], shards: [0], slots: 1, samples: 1}", "table 'a' has a frequent row twice"),
        ("{frequent_rows: [900], shards: [0], slots: 1, samples: 1}", "frequent row 900 of table 'a', which has 900"),
        ("{frequent_rows: [1], shards: [0], slots: 0, samples: 1}", "table 'a' has 0 slots for 1 samples"),
    ],
)
def test_hybrid_tables_that_cannot_be_are_refused(tmp_path, entry, message):
    np.save(tmp_path / "floats.npy", np.ones(3))
    (tmp_path / "plan.yaml").write_text(A % entry)
    with pytest.raises(ConfigError, match=message):
        make_plan(TABLES, str(tmp_path / "plan.yaml"), 2, 2, 64, PlannerSettings())


def test_memory_and_text_of_a_hybrid_plan():
    plan = Placement(TABLES, 2, ((), (), (1,)), (Hybrid(0, (5, 6), (0, 1), 3, 4),))
    assert [plan.rows_of(rank) for rank in range(2)] == [450 + 2 + 50, 450 + 2 + 50 + 3000]
    assert plan.text(10**6).splitlines() == [
        "rank  lookups/sample  rows and state, GB  tables (shard/shards)",
        "   0            0.75               0.502  a 0/2",
        "   1            3.75               3.502  a 1/2, c",
        "on every rank: b, 2 rows of a",
        "sent for a sample: 4.5 ids, 2.5 vectors",
    ]
    assert plan.fullest_bytes(8) == 3502 * 8 + 4 * 900  # 4 bytes of every row of a say which it is
    plan.check_memory(8, 3502 * 8 + 4 * 900)
    with pytest.raises(ConfigError, match="rank 1 would hold 31,616 bytes of rows and optimizer's state, of 31,615"):
        plan.check_memory(8, 3502 * 8 + 4 * 900 - 1)
    with pytest.raises(ConfigError, match="hybrid and sharded at once"):
        dataclasses.replace(plan, holders=((0,), (), (1,)))


def test_the_command_measures_training_batches(tmp_path, capsys):
    data, rows = tmp_path / "data", [40] * 26
    data.mkdir()
    generator = torch.Generator().manual_seed(0)
    words_NW = torch.randint(0, 40, (100, 40), generator=generator, dtype=torch.int32)
    words_NW[:, 14] = torch.arange(100, dtype=torch.int32) % 2 + 38  # C1
    for name in (FORMAT.train_file, FORMAT.eval_file):
        words_NW.numpy().tofile(data / name)
    files = manifest.describe_files(data, [FORMAT.train_file, FORMAT.eval_file])
    source = {"table_rows": json.dumps(rows), "hotness": json.dumps([1] * 26)}
    manifest.write(data, Manifest(FORMAT.name, files, {"train_samples": 100, "eval_samples": 100}, True, source))
    arguments = [
        "scale=test", "device=cpu", f"data_dir={data}", "scale.gpus_per_node=4", "embeddings.plan=row_wise",
        f"benchmark.facts.table_rows={rows}", "micro_batch=8", "hparams.global_batch_size=32",
    ]  # fmt: skip
    path = tmp_path / "plan.yaml"
    hybrid_planning.main("dlrm", Dlrm, ["--write", str(path), "--frequent", "2", "--tables", "C1", *arguments])
    tables = Tables(tuple(Table(f"C{n}", 40, 1) for n in range(1, 27)), 4)
    plan = plan_file.read(path, tables, 4)
    assert plan.hybrids == (Hybrid(0, (38, 39), (0, 1, 2, 3), 10, 8),)  # more than all rows of a shard are never asked
    assert "2 rows of C1" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="no batch of 128"):
        hybrid_planning.main(
            "dlrm", Dlrm, ["--write", str(path), "--frequent", "2", *arguments[:-1], "hparams.global_batch_size=128"]
        )
    hybrid_planning.main(
        "dlrm", Dlrm, ["--write", str(path), "--frequent", "2", "--synthetic", "--tables", "C2", *arguments]
    )
    assert [hybrid.table for hybrid in plan_file.read(path, tables, 4).hybrids] == [1]
