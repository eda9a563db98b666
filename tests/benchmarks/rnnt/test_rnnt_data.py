"""Test batches of a prepared folder: utterances, samples and tokens."""

import itertools

import numpy as np
import pytest
import small_corpus
import torch

from benchmarks.rnnt.data import PADDING, EvalBatches, FeaturePreparer, open_eval, open_train
from benchmarks.rnnt.data_settings import spliced_frames
from common.data.batches import Block
from common.distributed.layout import Layout
from common.errors import DataError

TRAIN = [int(samples) for samples in np.random.default_rng(5).integers(8_000, 60_000, 47)]
TRAIN[11] = 80_001  # longer than max_duration
TRAIN[12] = 80_000
EVAL = [5_000, 33_000, 9_000, 120_000, 30_001, 2_100, 64_000]
BLOCK = Block(0, 1, 1, 0, 40)
SETTINGS = {"buckets": [[120, 21], [250, 21]]}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return small_corpus.write(tmp_path_factory.mktemp("rnnt") / "data", TRAIN, EVAL, shards=3)


@pytest.fixture(scope="module")
def batches(root):
    return read(root, BLOCK)


def read(root, block, start=0, layout=None, micro_batch=4, accumulation=2, **changed):
    source = open_train(
        root, small_corpus.settings(**SETTINGS, **changed), layout or Layout(), micro_batch, accumulation
    )
    try:
        return list(source.batches(block, start))
    finally:
        source.close()


def audio_of(tensors, slot):
    first = int(tensors["audio_offsets"][slot])
    return tensors["audio"][first : first + int(tensors["audio_lengths"][slot])].numpy()


def test_training_batches_have_samples_and_tokens_of_distinct_utterances(batches):
    by_samples = {samples: utterance for utterance, samples in enumerate(TRAIN)}
    assert len(by_samples) == len(TRAIN)
    seen = []
    for position, batch in enumerate(batches):
        tensors = batch.tensors
        assert (batch.position, batch.samples) == (position, 4)
        assert tensors["tokens"].shape == (4, 21)
        assert tensors["seed"].shape == (1,)
        assert {name: tensors[name].dtype for name in ("tokens", "token_lengths", "speeds", "utterance_seeds")} == {
            "tokens": torch.int32, "token_lengths": torch.int32, "speeds": torch.float64,
            "utterance_seeds": torch.int64,
        }  # fmt: skip
        for slot in range(4):
            length = int(tensors["audio_lengths"][slot])
            utterance = by_samples[length]
            seen.append(utterance)
            assert np.array_equal(audio_of(tensors, slot), small_corpus.audio(length, utterance))
            assert tensors["resampled_lengths"][slot] == np.ceil(length * float(tensors["speeds"][slot]))
            tokens = small_corpus.tokens_of(utterance, 1 + length // 4000)
            assert tensors["token_lengths"][slot] == len(tokens)
            assert tensors["tokens"][slot].tolist() == tokens.tolist() + [0] * (21 - len(tokens))
        frames = spliced_frames(tensors["resampled_lengths"].numpy(), small_corpus.facts())
        assert frames.max() <= batch.key[0]
        assert (np.diff(frames) <= 0).all()
    assert len(set(seen)) == len(seen) == 40
    assert 11 not in seen


def test_only_utterances_above_the_maximum_duration_are_left_out(root):
    whole = read(root, Block(0, 1, 1, 0, 46), micro_batch=2, accumulation=1, train_samples=46)
    lengths = torch.cat([batch.tensors["audio_lengths"] for batch in whole]).tolist()
    assert sorted(lengths) == sorted(set(TRAIN) - {80_001})


def test_a_block_can_be_read_from_any_position(root, batches):
    for start in (1, 6, 10):
        rest = read(root, BLOCK, start)
        assert len(rest) == len(batches) - start
        for mine, other in zip(rest, batches[start:], strict=True):
            assert_equal(mine, other)


def test_batches_do_not_depend_on_the_number_of_threads(root, batches):
    for batch, other in zip(read(root, BLOCK, threads=5), batches, strict=True):
        assert_equal(batch, other)


def assert_equal(batch, other):
    assert batch.key == other.key
    assert set(batch.tensors) == set(other.tensors)
    for name in set(batch.tensors) - {"audio"}:  # whose gaps have no meaning
        assert torch.equal(batch.tensors[name], other.tensors[name]), name
    for slot in range(len(batch.tensors["speeds"])):
        assert np.array_equal(audio_of(batch.tensors, slot), audio_of(other.tensors, slot))


def test_epochs_differ_and_counts_equal_the_manifests(root, batches):
    second = read(root, Block(1, 2, 1, 40, 40))
    assert [batch.tensors["utterance_seeds"].tolist() for batch in second] != [
        batch.tensors["utterance_seeds"].tolist() for batch in batches
    ]
    source = open_train(root, small_corpus.settings(), Layout(), 4, 2)
    assert (source.train_samples, source.eval_samples, source.synthetic) == (40, len(EVAL), True)
    source.close()


@pytest.mark.parametrize("replicas", [1, 2, 3, 9])
def test_an_evaluation_has_every_utterance_once(root, replicas):
    settings, seen, keys = small_corpus.settings(eval_batch=2), [], []
    for replica in range(replicas):
        source = open_eval(root, settings, Layout({"dp": replicas}, replica))
        found = list(source)
        assert len(found) == len(source) == -(-len(EVAL) // (2 * replicas))
        assert source.eval_samples == len(EVAL)
        keys.append([batch.key for batch in found])
        for batch in found:
            tensors = batch.tensors
            assert set(tensors["speeds"].tolist()) == {1.0}
            assert torch.equal(tensors["resampled_lengths"], tensors["audio_lengths"])
            frames = spliced_frames(tensors["audio_lengths"].numpy(), small_corpus.facts())
            assert frames.max() <= batch.key[1]
            for slot, utterance in enumerate(tensors["utterance"].tolist()):
                if utterance != PADDING:
                    seen.append(utterance)
                    assert np.array_equal(audio_of(tensors, slot), small_corpus.audio(EVAL[utterance], utterance))
                else:
                    assert np.array_equal(audio_of(tensors, slot), small_corpus.audio(2_100, 5))
        assert [batch.tensors["utterance_seeds"].tolist() for batch in source] == [
            batch.tensors["utterance_seeds"].tolist() for batch in found
        ]
        source.close()
    assert sorted(seen) == list(range(len(EVAL)))
    assert keys == [keys[0]] * replicas
    assert set(itertools.chain(*keys)) <= {("eval", 64), ("eval", 400)}


def test_evaluation_features_do_not_depend_on_ranks(root):
    found = []
    for replicas in (1, 2):
        features = {}
        for replica in range(replicas):
            layout = Layout({"dp": replicas}, replica)
            settings = small_corpus.settings(eval_batch=2)
            preparer = FeaturePreparer(settings.facts, 256, "reference", torch.device("cpu"), torch.float32)
            source = open_eval(root, settings, layout)
            for batch in source:
                made = preparer.tensors(batch.tensors, batch.key[1], training=False)
                for slot, utterance in enumerate(made["utterance"].tolist()):
                    length = int(made["feature_lengths"][slot])
                    features[utterance] = made["features"][:length, slot].clone()
            source.close()
        found.append(features)
    for utterance in range(len(EVAL)):  # rounding of products depends on their shape
        torch.testing.assert_close(found[1][utterance], found[0][utterance], rtol=0, atol=1e-3)


def test_bad_data_are_refused(root, tmp_path):
    with pytest.raises(DataError, match=r"has 251 frames \(7\.50 s\), more than all of .*eval_buckets=\[64\]"):
        open_eval(root, small_corpus.settings(eval_buckets=[64]), Layout())
    with pytest.raises(DataError, match=r"no training utterance of at most max_duration=0\.1"):
        open_train(root, small_corpus.settings(max_duration=0.1), Layout(), 1, 1)
    short = small_corpus.write(tmp_path / "short", [180, 9000], [160, 9000], shards=1)
    for open_ in (
        lambda: open_train(short, small_corpus.settings(2), Layout(), 1, 1),
        lambda: open_eval(short, small_corpus.settings(), Layout()),
    ):
        with pytest.raises(DataError, match=r"an utterance of 1[68]0 samples, and a frame takes more than 160"):
            open_()
    with pytest.raises(DataError, match="the evaluation set has no utterance"):
        EvalBatches(np.zeros(0, np.int32), [64], small_corpus.facts(), 2, 1, 0)
