"""Test the order of training utterances, their speeds, and the sizes to which micro-batches are padded."""

import itertools

import numpy as np
import pytest
import small_corpus

from benchmarks.rnnt.data_settings import RowStatistics, resampled, spliced_frames
from benchmarks.rnnt.utterance_order import UtteranceStream, interleaved, kept_samples
from common.data.batches import Block
from common.data.order import MicroBatches
from common.errors import ConfigError, DataError

COUNT, KEPT, GLOBAL_BATCH = 103, 96, 16
SAMPLES = np.random.default_rng(0).integers(8_000, 64_000, COUNT)
TOKENS = 1 + SAMPLES // 4000
STEPS = KEPT // GLOBAL_BATCH


def stream(micro_batch=GLOBAL_BATCH, accumulation=1, replicas=1, replica=0, seed=3, **changed):
    mine = MicroBatches(micro_batch, accumulation, replicas, replica)
    settings = small_corpus.settings(**{"train_samples": KEPT + 5, **changed})
    return UtteranceStream(SAMPLES, TOKENS, settings, mine, seed)


def epoch_of(opened, epoch):
    """Return the utterances of each global batch of an epoch."""
    return [opened.drawn(epoch * STEPS + step).utterance_B.tolist() for step in range(STEPS)]


@pytest.mark.parametrize("num_buckets", [1, 6])
def test_an_epoch_has_each_utterance_at_most_once(num_buckets):
    opened = stream(num_buckets=num_buckets)
    assert opened.train_samples == KEPT
    epochs = [list(itertools.chain(*epoch_of(opened, epoch))) for epoch in range(3)]
    for order in epochs:
        assert len(set(order)) == KEPT
        assert set(order) <= set(range(COUNT))
    assert epochs[0] != epochs[1]
    assert set(epochs[0]) != set(epochs[1])


def test_dropped_utterances_do_not_depend_on_length():
    opened, epochs = stream(num_buckets=3), 400
    dropped = np.zeros(COUNT)
    for epoch in range(epochs):
        dropped[list(set(range(COUNT)) - set(itertools.chain(*epoch_of(opened, epoch))))] += 1
    assert dropped.sum() == epochs * (COUNT - KEPT)
    by_length = dropped[np.argsort(SAMPLES)].reshape(-1)[: COUNT // 4 * 4].reshape(4, -1).sum(1)
    expected = epochs * (COUNT - KEPT) * (COUNT // 4) / COUNT
    assert np.abs(by_length - expected).max() < 5 * np.sqrt(expected)


def test_several_ranks_read_the_same_as_one_rank_that_accumulates():
    alone = stream(micro_batch=2, accumulation=8)
    for replicas in (8, 4):
        accumulation = 8 // replicas
        ranks = [stream(2, accumulation, replicas, replica) for replica in range(replicas)]
        for number in range(2 * STEPS * 8):
            step, index = divmod(number, 8)
            part = ranks[index % replicas]
            position = step * accumulation + index // replicas
            mine, other = alone.drawn(number), part.drawn(position)
            assert mine.epoch == other.epoch
            for name in ("utterance_B", "speed_B", "samples_B", "seed_B"):
                assert np.array_equal(getattr(mine, name), getattr(other, name))
            assert alone.key(number) == part.key(position)
            assert alone.random_seed(number) == part.random_seed(position)


def test_each_micro_batch_has_short_and_long_utterances():
    opened = stream(micro_batch=4, accumulation=4)
    for step in range(2 * STEPS):
        drawn = [opened.drawn(step * 4 + index) for index in range(4)]
        samples = np.sort(np.concatenate([one.samples_B for one in drawn]))
        for index, one in enumerate(drawn):
            expected = [*samples[2 * index : 2 * index + 2], *samples[::-1][2 * index : 2 * index + 2]]
            assert sorted(one.samples_B.tolist()) == sorted(expected)


@pytest.mark.parametrize(
    ("lengths", "mixed"), [([3, 1, 4, 1.5, 5], [1, 5, 1.5, 4, 3]), ([6, 2, 8, 4], [2, 8, 4, 6]), ([7], [7])], ids=str
)
def test_shortest_and_longest_utterances_alternate(lengths, mixed):
    samples_P = np.array([int(10 * length) for length in lengths])
    order = interleaved(np.arange(len(lengths))[None], samples_P)
    assert samples_P[order[0]].tolist() == [int(10 * length) for length in mixed]


def test_a_micro_batch_has_the_longest_utterance_first():
    opened = stream(micro_batch=4, accumulation=4)
    for number in range(4 * STEPS):
        assert (np.diff(opened.drawn(number).samples_B) <= 0).all()


def test_speeds_and_seeds_depend_only_on_utterance_epoch_and_seed():
    opened, other = stream(), stream(micro_batch=8, accumulation=3, train_samples=50, num_buckets=2)
    facts = small_corpus.facts()
    first, second = opened.epoch(0), opened.epoch(1)
    assert np.array_equal(first.speed_P, other.epoch(0).speed_P)
    assert np.array_equal(first.seed_P, other.epoch(0).seed_P)
    assert not np.isin(first.seed_P, second.seed_P).any()
    assert len(set(first.speed_P) & set(second.speed_P)) == 0
    speeds = np.concatenate([opened.epoch(epoch).speed_P for epoch in range(100)])
    assert speeds.min() >= facts.speed_min
    assert speeds.max() <= facts.speed_max
    assert abs(speeds.mean() - 1) < 5 * 0.3 / np.sqrt(12 * len(speeds))
    drawn = opened.drawn(2)
    assert np.array_equal(drawn.samples_B, np.ceil(SAMPLES[drawn.utterance_B] * drawn.speed_B))
    assert not np.array_equal(first.speed_P, stream(seed=4).epoch(0).speed_P)


def test_global_batches_have_utterances_of_similar_length():
    opened = stream(num_buckets=6)
    bucket_of = np.empty(COUNT, int)
    for number, part in enumerate(np.array_split(np.argsort(SAMPLES, kind="stable"), 6)):
        bucket_of[part] = number
    orders = [[bucket_of[batch] for batch in epoch_of(opened, epoch)] for epoch in range(2)]
    for order in orders:
        assert all(buckets.max() - buckets.min() <= 1 for buckets in order)
    firsts = [[buckets.min() for buckets in order] for order in orders]
    assert firsts[0] != sorted(firsts[0]) or firsts[1] != sorted(firsts[1])  # global batches are shuffled too


def test_blocks_continue_after_the_previous_block():
    opened = stream(micro_batch=4, accumulation=2, replicas=2, replica=1)
    blocks = [Block(0, 1, 1, 0, KEPT), Block(1, 2, 1, KEPT, KEPT)]
    assert [opened.first_micro_batch(block) for block in blocks] == [0, 2 * STEPS]
    assert [opened.micro_batches(block) for block in blocks] == [2 * STEPS] * 2
    assert opened.samples_of(2 * STEPS)[0][0] == 1
    assert (opened.train_samples, opened.micro_batch, opened.replicas) == (KEPT, 4, 2)


def test_a_key_is_the_smallest_bucket_that_fits():
    opened, facts = stream(micro_batch=2, accumulation=8), small_corpus.facts()
    buckets = [tuple(bucket) for bucket in small_corpus.READER["buckets"]]
    seen = set()
    for number in range(8 * STEPS):
        drawn = opened.drawn(number)
        frames = int(spliced_frames(drawn.samples_B, facts).max())
        tokens = int(TOKENS[drawn.utterance_B].max())
        expected = next(bucket for bucket in buckets if frames <= bucket[0] and tokens <= bucket[1])
        assert opened.key(number) == expected
        seen.add(expected)
    assert len(seen) > 1


def test_the_key_has_the_rows_of_a_micro_batch_above_the_capacity():
    facts = small_corpus.facts()
    opened = stream(micro_batch=2, accumulation=8, rows={"mean": 500.0, "deviation": 10.0})
    capacity = 2 * 500 + 6 * np.sqrt(2) * 10
    kinds = set()
    for number in range(8 * STEPS):
        drawn = opened.drawn(number)
        frames = spliced_frames(drawn.samples_B, facts)
        pairs = zip(frames.tolist(), TOKENS[drawn.utterance_B].tolist(), strict=True)
        rows = sum((each + 1) // 2 * (tokens + 1) for each, tokens in pairs)
        key = opened.key(number)
        assert key[2:] == ((rows,) if rows > np.ceil(capacity) else ())
        kinds.add(len(key))
    assert kinds == {2, 3}


def test_capacity_is_six_deviations_above_the_mean_and_at_most_the_maximum():
    rows = RowStatistics(12_916.0, 6_509.0)
    assert rows.capacity(192, (616, 128)) == int(np.ceil(192 * 12_916 + 6 * np.sqrt(192) * 6_509))
    assert rows.capacity(1, (20, 9)) == 10 * 10
    assert RowStatistics().capacity(8, (21, 9)) == 8 * 11 * 10


def test_settings_that_contradict_the_data_are_refused():
    with pytest.raises(DataError, match=r"103 training utterances last up to 5\.0 s, .* trains on 112: give"):
        stream(train_samples=115)
    with pytest.raises(ConfigError, match=r"hparams.global_batch_size=16: an epoch has 15 utterances"):
        stream(train_samples=15)
    with pytest.raises(DataError, match=r"can have \d+ frames .* and 16 tokens, .*\[\[250, 15\]\]: add a bucket"):
        stream(buckets=[[250, 15]])
    longest = spliced_frames(resampled(SAMPLES.max(keepdims=True), np.array([1.15])), small_corpus.facts())
    longest = int(longest[0])
    even = longest // 2 * 2
    stream(buckets=[[even + 2, 16]])
    with pytest.raises(DataError, match=rf"can have {longest} frames \(an utterance of {SAMPLES.max()} samples"):
        stream(buckets=[[even - 2, 16]])
    assert kept_samples(278_900, 1536) == 278_016


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"buckets": []}, r"buckets=\[\]"),
        ({"buckets": [[61, 12]]}, "an even number"),
        ({"buckets": [[60, 0]]}, "tokens=0: at least 1"),
        ({"buckets": [[60, 20], [80, 12]]}, "the last is the largest"),
        ({"eval_buckets": []}, r"eval_buckets=\[\]"),
        ({"eval_buckets": [80, 60]}, "ascending"),
        ({"rows": {"mean": -1.0}}, "rows.mean"),
    ],
    ids=str,
)
def test_invalid_reader_settings_are_refused(changed, message):
    with pytest.raises(ConfigError, match=message):
        small_corpus.settings(**changed)
