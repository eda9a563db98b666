"""Test the DLRMs on a GPU: area under the ROC curve, click logs, and sharded embeddings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

from common.data import manifest
from common.data.batches import Block
from common.data.manifest import Manifest
from common.data.order import MicroBatches
from common.distributed.layout import Layout
from common.errors import ConfigError
from common.recommendation.auc import CHUNK, rank, ranking_keys
from common.recommendation.criteo.evaluation_rows import open_evaluation
from common.recommendation.criteo.row_reader import RowReaderSettings
from common.recommendation.criteo.sample_rows import SampleFormat
from common.recommendation.criteo.training_rows import open_training
from common.recommendation.embeddings import ShardedEmbeddings
from common.recommendation.placement import Hybrid, Placement, row_wise
from common.recommendation.row_store import fill
from common.recommendation.slots import SlotFinder
from common.recommendation.tables import Table, Tables, synthetic_ids
from tests.common.recommendation import embedding_ranks as small
from tests.gpu.support import captured

pytestmark = pytest.mark.gpu

# The area under the ROC curve


CRITEO = 89_137_319


def made_keys(samples):
    """Return keys of random predictions with 3 % of positive labels, as in Criteo's data."""
    keys = torch.empty(samples, dtype=torch.int32, device="cuda")
    for part in keys.split(CHUNK):
        labels = torch.rand(len(part), device="cuda") < 0.03
        part.copy_(ranking_keys(torch.randn(len(part), device="cuda") + 1.2 * labels - 3.5, labels))
    return keys


def test_the_area_is_that_of_scikit_learn():
    keys = made_keys(3_000_000)
    found = rank(keys).area
    host = keys.cpu()
    expected = roc_auc_score((host & 1).numpy(), (host >> 1).view(torch.float32).numpy())
    assert found == pytest.approx(expected, rel=0, abs=1e-12)


@pytest.mark.parametrize("logit", [0.0, -3.5])
def test_half_a_day_of_ties_is_counted_exactly(logit):
    labels = torch.arange(CRITEO, device="cuda") % 32 == 0
    found = rank(ranking_keys(torch.full((CRITEO,), logit, device="cuda"), labels))
    positives = -(-CRITEO // 32)
    assert (found.positives, found.negatives) == (positives, CRITEO - positives)
    assert found.doubled_wins == positives * (CRITEO - positives)


def test_the_sort_keeps_to_its_memory():
    keys = made_keys(CRITEO)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    rank(keys)
    assert torch.cuda.max_memory_allocated() - before < 33 * CRITEO


def test_keys_are_recorded_in_a_graph():
    logits, labels = torch.randn(4096, device="cuda"), torch.randint(2, (4096,), device="cuda")
    count = torch.full((), 4096, dtype=torch.int64, device="cuda")
    graph, keys = captured(lambda: ranking_keys(logits, labels, count))
    logits.normal_()
    count.fill_(1000)
    graph.replay()
    assert torch.equal(keys, ranking_keys(logits, labels, 1000))


# Prepared click logs


FORMAT = SampleFormat("multi-hot/1", True, "train_data.bin", "val_data.bin", "prepare")
TABLES = Tables(tuple(Table(f"{k}", 1000, hotness) for k, hotness in enumerate((100, 27, 12, 75))), 128)
WORDS = 228
TRAIN, EVAL, BATCH = 60 * 512 + 77, 20_011, 512


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("rows")
    random = np.random.default_rng(0)
    for name, count in (("train_data.bin", TRAIN), ("val_data.bin", EVAL)):
        random.integers(0, 1000, (count, WORDS)).astype(np.int32).tofile(folder / name)
    source = {"table_rows": "[1000, 1000, 1000, 1000]", "hotness": "[100, 27, 12, 75]"}
    files = manifest.describe_files(folder, ["train_data.bin", "val_data.bin"])
    counts = {"train_samples": TRAIN, "eval_samples": EVAL}
    manifest.write(folder, Manifest(FORMAT.name, files, counts, True, source))
    return folder


@pytest.mark.parametrize("files", ["auto", "buffered", "mapped"])
@pytest.mark.parametrize("late", [False, True])
def test_batches_of_a_side_stream_are_those_of_the_file(data: Path, files: str, late: bool) -> None:
    settings = RowReaderSettings(files=files, ahead=1)  # type: ignore[arg-type]
    device, stream = torch.device("cuda"), torch.cuda.Stream()
    source = open_training(data, FORMAT, TABLES, MicroBatches(BATCH), device, settings)
    found = []
    with torch.cuda.stream(stream):
        for batch in source.batches(Block(0, 1, 0, 0, TRAIN)):
            if late:
                torch.cuda._sleep(2_000_000)  # about a millisecond, in which the next batches would be read
            words = batch.tensors["words"]
            assert words.is_pinned() == (files != "mapped")
            found.append(FORMAT.decode(words.to(device, non_blocking=True)))
    torch.cuda.synchronize()
    source.close()
    expected = np.fromfile(data / "train_data.bin", np.int32).reshape(-1, WORDS)[: 60 * BATCH]
    ids = torch.cat([batch["ids"] for batch in found]).cpu().numpy()
    dense = torch.cat([batch["dense"] for batch in found]).cpu().numpy()
    np.testing.assert_array_equal(ids, expected[:, 14:])
    np.testing.assert_array_equal(dense.view(np.int32), expected[:, 1:14])


def test_resident_batches_stay_on_the_device(data: Path) -> None:
    settings = RowReaderSettings(resident_gb=1.0)
    source = open_evaluation(data, FORMAT, TABLES, 4096, 1, 0, torch.device("cuda"), settings)
    first, second = list(source), list(source)
    assert [batch.samples for batch in first] == [4096] * 4 + [EVAL - 4 * 4096]
    assert all(batch.tensors["ids"].is_cuda for batch in first)
    assert [a.tensors["ids"].data_ptr() for a in first] == [b.tensors["ids"].data_ptr() for b in second]
    expected = np.fromfile(data / "val_data.bin", np.int32).reshape(-1, WORDS)[:, 14:]
    ids = torch.cat([batch.tensors["ids"][: batch.samples] for batch in second]).cpu().numpy()
    np.testing.assert_array_equal(ids, expected)
    source.close()


# Sharded embeddings


MODES = {
    "fp16": {"dtype": torch.float16, "scale": 64.0},
    "bf16": {"dtype": torch.bfloat16},
    "fp16_rows": {"dtype": torch.float16, "rows_dtype": torch.float16, "stochastic_rounding": True, "scale": 64.0},
}


def trained(mode: str, **options: Any) -> dict[str, Any]:
    layout = Layout(device="cuda", seed=small.SEED)
    return small.train(small.plans(1)["mixed"], layout, **MODES[mode], **options)


@pytest.mark.parametrize("mode", MODES)
def test_captured_and_overlapped_training_equals_eager_training(mode):
    plain = trained(mode, overlap=False)
    for options in ({"captured": True, "overlap": False}, {"captured": True, "early": True}, {"early": True}):
        found = trained(mode, **options)
        assert all(torch.equal(found[name], value) for name, value in plain.items()), options


@pytest.mark.parametrize("mode", MODES)
def test_kernels_train_nearly_as_tables_of_pytorch(mode):
    found, start, end = trained(mode, rule=small.RULES["sgd"]), small.reference(iterations=0), small.reference("sgd")
    errors = moved = 0.0
    for number, (first, last) in enumerate(zip(start.rows, end.rows, strict=True)):
        errors += float((found[f"{number}/0/1"].cpu().double() - last).norm())
        moved += float((first - last).norm())
    assert 0 < errors < 0.1 * moved


@pytest.mark.parametrize("slots", [1, 3, 40])
def test_slots_are_those_of_a_cpu_captured_too(slots):
    tables = Tables((Table("a", 40_000, 3), Table("b", 50, 2), Table("c", 900, 20)), 4)
    hybrids = (
        Hybrid(0, tuple(range(0, 40_000, 7)), (2, 0, 1), 40 * slots, 512),
        Hybrid(2, (), (1, 2), 10 * slots, 512),
    )
    plan = Placement(tables, 3, ((), (0,), ()), hybrids)
    generator = torch.Generator().manual_seed(slots)
    batches = [synthetic_ids(tables, 2048, "zipf", generator) for _ in range(3)]
    batches[1][::5, 0], batches[2][3, 7] = -1, 900
    there, here = SlotFinder(plan, torch.device("cuda")), SlotFinder(plan, torch.device("cpu"))
    ids_BL = batches[0].cuda()
    graph, results = captured(lambda: there.find(ids_BL))
    for batch in batches:
        ids_BL.copy_(batch)
        graph.replay()
        expected = here.find(batch)
        assert torch.equal(results.overflow_H.cpu(), expected.overflow_H)
        assert torch.equal(results.local_BL.cpu(), expected.local_BL)
        assert torch.equal(results.slot_BK.cpu(), expected.slot_BK)
        ours = int(expected.keys.ours)
        assert int(results.keys.ours) == ours
        assert torch.equal(results.keys.row_M.cpu(), expected.keys.row_M)
        assert torch.equal(results.keys.source_M[:ours].cpu(), expected.keys.source_M[:ours])
        if not expected.overflow_H.any():  # the last slot of a shard with too few is anybody's
            assert torch.equal(results.requested_S.cpu(), expected.requested_S)


def test_initial_rows_are_those_of_a_cpu():
    there, here = torch.empty(50_000, 128, device="cuda"), torch.empty(50_000, 128)
    for rows in (there, here):
        fill(rows, 3, 40_000_000, 7, 1, 8)
    assert torch.equal(there.cpu(), here)


def test_tables_beyond_the_memory_are_refused():
    tables = Tables((Table("large", 2_000_000_000, 1),), 4096)
    with pytest.raises(ConfigError, match="bytes of rows for cuda"):
        ShardedEmbeddings(row_wise(tables, 1), Layout(device="cuda"), dtype=torch.float16, rows_dtype=torch.float32)
