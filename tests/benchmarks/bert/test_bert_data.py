"""From shards to micro-batches: order, ranks, resuming, tensors, and damaged files."""

import itertools
import shutil
import threading
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.bert.collate import collate, example, example_lengths, training_shape
from benchmarks.bert.data import balanced, cycle_of, filled, open_evaluation, open_train, read_manifest
from benchmarks.bert.shards import ShardFile
from common.data.batches import Block
from common.distributed.layout import Layout
from common.errors import ConfigError, DataError
from tests.benchmarks.bert.small_shards import (
    EVALUATION,
    Sample,
    expected_tensors,
    make_packs,
    make_samples,
    numbers_in,
    settings,
    write_data,
)

PACKS, SHARDS = 48, 3


@pytest.fixture(scope="module")
def packs() -> list[list[Sample]]:
    """48 packs: as many of one as of three sequences, and eight of two."""
    sizes = [1, 3, 1, 3, 2, 3, 1, 1, 3, 1, 3, 2] * (PACKS // 12)
    return make_packs(sizes)


@pytest.fixture(scope="module")
def root(tmp_path_factory, packs) -> Path:
    """The packs in three shards of 16, and 23 evaluation sequences."""
    return write_data(tmp_path_factory.mktemp("bert") / "data", packs, SHARDS, make_samples([20] * 20 + [32] * 3, 1))


@pytest.fixture
def damaged(root, tmp_path) -> Path:
    """A copy of the folder that a test may damage."""
    return Path(shutil.copytree(root, tmp_path / "damaged"))


def whole(steps, global_batch):
    return Block(0, 1, 0, 0, steps * global_batch)


def read(root, replicas, accumulation, rows, steps, seed=3, **changes):
    """Micro-batches of all ranks: per step a list of host batches, in the order of their streams."""
    chosen = settings(**changes)
    micro_batch = rows * chosen.samples_per_row
    sources = [
        open_train(root, chosen, Layout({"dp": replicas}, rank, seed=seed), micro_batch, accumulation)
        for rank in range(replicas)
    ]
    block = whole(steps, micro_batch * accumulation * replicas)
    per_rank = [list(source.batches(block)) for source in sources]
    for source in sources:
        source.close()
    return [
        [per_rank[rank][step * accumulation + a] for a in range(accumulation) for rank in range(replicas)]
        for step in range(steps)
    ]


def same(ours, theirs):
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.key == other.key
        assert mine.tensors.keys() == other.tensors.keys()
        for name, tensor in mine.tensors.items():
            assert torch.equal(tensor, other.tensors[name]), name


@pytest.mark.parametrize("form", ["packed", "unpacked"])
@pytest.mark.parametrize(("replicas", "accumulation"), [(1, 1), (2, 1), (3, 1), (1, 4), (2, 2), (8, 1), (2, 4)])
def test_every_row_comes_once_per_epoch_of_shards(root, packs, form, replicas, accumulation):
    # Every stream reads three whole shards, so all streams together read as many epochs as there are streams. The 96
    # sequences are in three files of 32, the 48 packs in three of 16.
    rows, steps = (4, PACKS // 4) if form == "packed" else (8, 96 // 8)
    order = {"order": "shuffled", "format": form}
    seen = Counter()
    for batches in read(root, replicas, accumulation, rows, steps, **order):
        for batch in batches:
            seen.update(numbers_in(batch.tensors))
    sequences = sum(map(len, packs))
    assert sequences == 96
    assert seen == Counter(dict.fromkeys(range(sequences), replicas * accumulation))


@pytest.mark.parametrize("order", ["shuffled", "balanced"])
@pytest.mark.parametrize(("replicas", "accumulation"), [(6, 1), (2, 3), (3, 2)])
def test_ranks_see_what_one_rank_sees_that_accumulates(root, order, replicas, accumulation):
    several = read(root, replicas, accumulation, 3, 15, order=order)
    one = read(root, 1, 6, 3, 15, order=order)
    for step in range(15):
        same(several[step], one[step])


def test_dropout_seeds_differ_between_all_micro_batches(root):
    batches = itertools.chain.from_iterable(read(root, 2, 2, 3, 15))
    assert len({int(batch.tensors["dropout_seed"]) for batch in batches}) == 60


@pytest.mark.parametrize("graph_per_count", [False, True])
def test_reading_on_from_a_position_equals_reading_through(root, graph_per_count):
    changes = {"order": "balanced", "graph_per_count": graph_per_count}
    blocks = [Block(0, 1, 0, 0, 50), Block(1, 1, 0, 50, 70)]  # 12 a step: 5 steps of two micro-batches, then 5
    through = open_train(root, settings(**changes), Layout({"dp": 1}, 0, seed=3), 6, 2)
    complete = [list(through.batches(block)) for block in blocks]
    through.close()
    assert [len(batches) for batches in complete] == [10, 10]
    for block, batches in zip(blocks, complete, strict=True):
        for start in range(len(batches) + 1):
            resumed = open_train(root, settings(**changes), Layout({"dp": 1}, 0, seed=3), 6, 2)
            rest = list(resumed.batches(block, start))
            resumed.close()
            same(rest, batches[start:])
            assert [batch.position for batch in rest] == list(range(start, len(batches)))


def test_the_seed_decides_the_order(root):
    first, again, other = (
        [numbers_in(batch.tensors) for (batch,) in read(root, 1, 1, 4, 8, seed=seed)] for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other


def test_rows_of_a_shard_are_shuffled_anew_in_every_epoch(root):
    order = [number for (batch,) in read(root, 1, 1, 4, 2 * PACKS // 4) for number in numbers_in(batch.tensors)]
    assert order[:96] != order[96:]
    assert sorted(order[:96]) == sorted(order[96:])


def test_samples_are_counted_nominally(root):
    (batch, *_), *_ = read(root, 3, 1, 4, 1)
    assert batch.samples == 4 * 2 * 3
    (batch, *_), *_ = read(root, 3, 1, 4, 1, format="unpacked")
    assert batch.samples == 4 * 3


def samples_in(batch, packs):
    by_number = {sample.number: sample for pack in packs for sample in pack}
    return [by_number[number] for number in numbers_in(batch.tensors)]


@pytest.mark.parametrize(("form", "sequences", "masked"), [("packed", 15, 30), ("unpacked", 5, 25)])
def test_tensors_hold_the_sequences_back_to_back(root, packs, form, sequences, masked):
    for (batch,) in read(root, 1, 1, 5, 9, format=form):  # some across the end of a shard
        tensors = dict(batch.tensors)
        seed = tensors.pop("dropout_seed")
        assert (seed.dtype, seed.shape) == (torch.int64, ())
        expected = expected_tensors(samples_in(batch, packs), 5 * 32, sequences, masked)
        assert tensors.keys() == expected.keys()
        for name, tensor in expected.items():
            torch.testing.assert_close(tensors[name], tensor, rtol=0, atol=0)


def test_a_graph_per_count_has_exactly_as_many_slots_as_sequences(root):
    keys = set()
    for (batch,) in read(root, 1, 1, 2, 24, graph_per_count=True):
        count = len(numbers_in(batch.tensors))
        assert batch.key == ("sequences", count)
        assert {len(batch.tensors[name]) for name in ("starts", "lengths", "next_sentence_labels")} == {count}
        keys.add(count)
    assert len(keys) > 2
    assert keys <= set(range(2, 7))


def test_without_it_all_batches_share_one_graph(root):
    assert {batch.key for (batch,) in read(root, 1, 1, 2, 24)} == {()}


def test_a_source_has_the_properties_of_the_manifest(root):
    source = open_train(root, settings(), Layout(), 4)
    source.close()
    assert (source.train_samples, source.eval_samples, source.synthetic) == (96, 23, True)


def test_closing_ends_the_thread_and_closes_the_shards(root):
    source = open_train(root, settings(), Layout(), 4)
    next(source.batches(whole(1, 4)))
    opened = {path for path in map(Path.resolve, Path("/proc/self/fd").iterdir()) if path.is_relative_to(root)}
    source.close()
    assert opened
    assert not [thread for thread in threading.enumerate() if thread.name == "shards"]
    still = {path for path in map(Path.resolve, Path("/proc/self/fd").iterdir()) if path.is_relative_to(root)}
    assert not still


def test_balanced_streams_have_equally_many_sequences_in_each_step(tmp_path):
    random = np.random.default_rng(0)
    sizes = random.permutation([1] * 200 + [2] * 20 + [3] * 200).tolist()
    root = write_data(tmp_path / "data", make_packs(sizes), 4, make_samples([20]))
    of_shard = [Counter(sizes[105 * shard : 105 * (shard + 1)]) for shard in range(4)]
    cycles = min(min(kinds[1] // 10, kinds[2], kinds[3] // 10) for kinds in of_shard)
    assert cycles >= 3
    steps = read(root, 4, 1, 3, cycles * 7, order="balanced")
    in_a_cycle = [1] * 10 + [2] + [3] * 10
    for number, batches in enumerate(steps):
        expected = sum((in_a_cycle * cycles)[3 * number : 3 * number + 3])
        assert [int((batch.tensors["lengths"] > 0).sum()) for batch in batches] == [expected] * 4


@pytest.mark.parametrize(
    ("packs_of", "cycle"),
    [
        ((37_350_000, 3_732_262, 37_322_369), (10, 1, 10)),  # the real set's mix
        ((0, 0, 7), (0, 0, 21)),
        ((1, 1, 1), (7, 7, 7)),
        ((1000, 1, 1000), (11, 0, 10)),
    ],
)
def test_a_cycle_has_the_shares_of_the_whole_set(packs_of, cycle):
    assert cycle_of(packs_of) == cycle


def test_the_balanced_order_has_cycles_and_ends_with_the_rest():
    sizes = np.array([3, 1, 1, 3, 1, 2, 3, 1, 1, 4])
    order = balanced(sizes, (2, 1, 1), np.random.default_rng(0))
    assert sorted(order) == list(range(10))
    assert sizes[order].tolist() == [1, 1, 2, 3, 1, 1, 3, 1, 3, 4]


def test_rows_of_a_kind_are_shuffled_in_the_balanced_order():
    sizes = np.tile([1, 3], 50)
    orders = [balanced(sizes, (10, 1, 10), np.random.default_rng(seed)) for seed in (0, 0, 1)]
    assert np.array_equal(orders[0], orders[1])
    assert not np.array_equal(orders[0], orders[2])


@pytest.mark.parametrize("damage", ["missing", "truncated", "text", "empty", "heap", "names"])
def test_a_damaged_shard_stops_the_run_with_its_name(damaged, damage):
    # Sizes are what the manifest says but for the truncated file, which is cut after the manifest was read.
    source = open_train(damaged, settings(), Layout(seed=3), 4)
    for path in (damaged / "packed").iterdir():
        content = path.read_bytes()
        if damage == "missing":
            path.unlink()
        elif damage in ("heap", "names"):
            signature = {"heap": b"GCOL", "names": b"SNOD"}[damage]  # of the values, and of the datasets' names
            assert signature in content
            path.write_bytes(content.replace(signature, b"XXXX"))
        else:
            path.write_bytes({"truncated": content[: len(content) // 2], "text": b"hello" * 100, "empty": b""}[damage])
    reasons = {"heap": "rows 0 to 16 cannot be read, the file is damaged", "names": "lacks the dataset input_ids"}
    reason = reasons.get(damage, "cannot be read as HDF5")
    with pytest.raises(DataError, match=rf"packed/part_0000\d:? {reason}.*mlperf-suite verify benchmark=bert"):
        next(source.batches(whole(1, 4)))
    source.close()


def test_the_format_of_16_bits_limits_the_vocabulary(root):
    with pytest.raises(ConfigError, match=r"vocabulary=40000.*up to 32767"):
        open_train(root, settings(vocabulary=40_000), Layout(), 4)


def test_half_a_row_is_no_micro_batch(root):
    with pytest.raises(ConfigError, match=r"micro_batch=5: with reader.format=packed it is a multiple of 2"):
        open_train(root, settings(), Layout(), 5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocabulary": 4999}, "vocabulary 5000 where the model has 4999: it is another data set"),
        ({"vocabulary": 5001}, "vocabulary 5000 where the model has 5001: it is another data set"),
        ({"max_sequence_length": 31}, "max_sequence_length 32 where the model has 31: it is another data set"),
        ({"max_sequence_length": 33}, "max_sequence_length 32 where the model has 33: it is another data set"),
    ],
)
def test_data_of_another_model_are_refused(root, changes, message):
    with pytest.raises(DataError, match=message):
        read_manifest(root, settings(**changes))


@pytest.mark.parametrize(
    ("pattern", "form", "message"),
    [
        (r'"shards": 3', "packed", "names 3 files packed/part_.* where it counts 4 shards"),
        (r'"train_packs": 48', "packed", "no train_packs"),
        (r'"packs_of_1"', "packed", r"counts \d+ packs of 1 to 3 sequences but 48 packs"),
        (r"packed/part_", "packed", "names no packed"),
        (r"varlength/part_0", "unpacked", "names no varlength; run 'mlperf-suite prepare .* --unpacked'"),
        (EVALUATION, "packed", "names no eval_varlength/part_eval_10k.hdf5"),
    ],
)
def test_a_manifest_of_other_data_is_refused(damaged, pattern, form, message):
    path = damaged / "manifest.json"
    other = {r'"shards": 3': '"shards": 4', r'"train_packs": 48': '"train_packs": 0', r'"packs_of_1"': '"none"'}.get(
        pattern
    )
    if other is None:  # the files are there under a name that nobody looks for
        other = f"elsewhere/{pattern}"
        (damaged / "elsewhere").mkdir()
        for folder in ("packed", "varlength", "eval_varlength"):
            shutil.copytree(damaged / folder, damaged / "elsewhere" / folder)
    path.write_text(path.read_text().replace(pattern, other))
    with pytest.raises(DataError, match=message):
        open_train(damaged, settings(format=form), Layout(), 4)


def test_evaluation_sequences_are_divided_into_contiguous_parts(root):
    for replicas in (1, 2, 3, 4, 23, 30):
        parts = [open_evaluation(root, settings(), Layout({"dp": replicas}, rank)) for rank in range(replicas)]
        numbers = [number for part in parts for batch in part.batches for number in numbers_in(batch)]
        assert numbers == list(range(23))
        sizes = [sum(len(numbers_in(batch)) for batch in part.batches) for part in parts]
        assert sizes == [23 * (rank + 1) // replicas - 23 * rank // replicas for rank in range(replicas)]
        assert {part.eval_samples for part in parts} == {23}


def test_evaluation_batches_are_filled_in_order(root):
    samples = make_samples([20] * 20 + [32] * 3, 1)
    batches = open_evaluation(root, settings(eval_rows=2), Layout()).batches
    # 64 tokens: three of 20, or one of 20 and one of 32, or two of 32.
    assert [numbers_in(batch) for batch in batches] == [
        [0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11], [12, 13, 14], [15, 16, 17], [18, 19], [20, 21], [22]
    ]  # fmt: skip
    for batch in batches:
        expected = expected_tensors([samples[number] for number in numbers_in(batch)], 64, 6, 12)
        for name, tensor in expected.items():
            torch.testing.assert_close(batch[name], tensor, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("lengths", "masked", "cuts"),
    [
        ([32, 32, 1], [1, 1, 1], [(0, 2), (2, 3)]),  # tokens
        ([8, 8, 8], [5, 5, 5], [(0, 2), (2, 3)]),  # masked tokens
        ([1] * 8, [1] * 8, [(0, 6), (6, 8)]),  # sequences
        ([32, 32], [6, 6], [(0, 2)]),
    ],
)
def test_an_evaluation_batch_ends_at_its_first_reached_limit(lengths, masked, cuts):
    shape = training_shape(settings().facts, settings().reader, 2)
    assert filled(np.array(lengths), np.array(masked), shape) == cuts


def test_an_evaluation_file_of_another_size_is_refused(damaged):
    path = damaged / "manifest.json"
    path.write_text(path.read_text().replace('"eval_samples": 23', '"eval_samples": 24'))
    with pytest.raises(DataError, match="input_ids has 23 rows where 24 belong into this file"):
        open_evaluation(damaged, settings(), Layout())


def shape_of(rows, **changes):
    chosen = settings(**changes)
    return training_shape(chosen.facts, chosen.reader, rows)


@pytest.mark.parametrize("changes", [{}, {"format": "unpacked"}])
@pytest.mark.parametrize("rows", [1, 2, 5])
def test_examples_have_the_form_of_training(root, changes, rows):
    (((batch,)),) = read(root, 1, 1, rows, 1, **changes)
    shape = shape_of(rows, **changes)
    made_up = example(shape, 5000, example_lengths(shape))
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in made_up.items()} == {
        name: (tensor.shape, tensor.dtype) for name, tensor in batch.tensors.items()
    }
    assert int(made_up["lengths"].sum()) == rows * 32


@pytest.mark.parametrize("count", [2, 3, 4, 5, 6])
def test_examples_can_be_made_for_every_count(count):
    shape = shape_of(2).for_count(count)
    lengths = example_lengths(shape_of(2), count)
    assert (len(lengths), sum(lengths)) == (count, 64)
    assert int((example(shape, 5000, lengths)["lengths"] > 0).sum()) == count


@pytest.mark.parametrize(
    ("lengths", "rows", "changes", "message"),
    [
        ([20, 20], 1, {}, "40 tokens where 32 fit"),
        ([4, 4, 4, 4], 1, {}, "4 sequences where 3 fit"),
        ([20, 20, 20], 2, {"format": "unpacked"}, "3 sequences where 2 fit"),
    ],
)
def test_rows_beyond_the_capacities_of_a_micro_batch_are_an_error(tmp_path, lengths, rows, changes, message):
    root = write_data(tmp_path / "data", [[sample] for sample in make_samples(lengths)], 1, make_samples([20]))
    file = ShardFile(root / "packed/part_00000", len(lengths), settings().training_limits())
    with pytest.raises(DataError, match=f"a micro-batch has {message}"):
        collate([file.read()], shape_of(rows, **changes), 0)
