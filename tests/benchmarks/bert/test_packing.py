"""Packs: nothing lost, nothing doubled, nothing too long, next to no padding."""

import numpy as np
import pytest

from benchmarks.bert.preparation.packing import best_fit, exact_combinations, pack, plan_packs


def contents(packs, lengths):
    """Tokens and sequences of every pack."""
    rows = packs.slots // 3
    return np.bincount(rows, lengths, packs.count), np.bincount(rows, minlength=packs.count)


def check(packs, lengths, longest):
    assert len(packs.slots) == len(lengths)
    assert len(np.unique(packs.slots)) == len(lengths)
    tokens, sequences = contents(packs, lengths)
    assert tokens.max() <= longest
    assert 1 <= sequences.min() <= sequences.max() <= 3
    np.testing.assert_array_equal(sequences, packs.sizes)
    return tokens.sum() / (packs.count * longest)


def wikipedia_like(source, total, longest):
    """Many full sequences, the others mostly short: 0.44 of a row on average."""
    return source.gamma(1.6, longest * 0.29, total).astype(int).clip(1, longest)


@pytest.mark.slow_cases("512-1", "512-2", "512-3")
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("longest", [128, 512])
def test_many_sequences_fill_more_than_99_per_cent(seed, longest):
    lengths = wikipedia_like(np.random.default_rng(seed), 40_000, longest)
    assert check(pack(lengths, longest, seed), lengths, longest) > 0.99


def fewest_rows(lengths, longest):
    """By trying everything: the first sequence alone, with each other one, and with each two others."""
    if not lengths:
        return 0
    first, rest = lengths[0], lengths[1:]
    best = 1 + fewest_rows(rest, longest)
    for i, second in enumerate(rest):
        if first + second <= longest:
            without = rest[:i] + rest[i + 1 :]
            best = min(best, 1 + fewest_rows(without, longest))
            for j in range(i, len(without)):
                if first + second + without[j] <= longest:
                    best = min(best, 1 + fewest_rows(without[:j] + without[j + 1 :], longest))
    return best


@pytest.mark.parametrize("seed", range(8))
def test_repeated_small_sets_need_no_more_rows_than_the_best_way_of_each(seed):
    """A thousand times a set that was solved by trying everything: that many times its rows, a few for rounding."""
    source = np.random.default_rng(seed)
    lengths = source.integers(1, 17, 7)
    best = 1000 * fewest_rows(lengths.tolist(), 16)
    packs = pack(np.tile(lengths, 1000), 16, seed)
    check(packs, np.tile(lengths, 1000), 16)
    assert packs.count <= best + 5


def test_no_packing_has_fewer_rows():
    """Lengths above a half of the row cannot meet: as many rows as those, when the rest fits beside them."""
    lengths = np.concatenate([np.full(5000, 40), np.full(5000, 24), np.full(1000, 64), np.full(999, 33)])
    packs = pack(lengths, 64, 0)
    check(packs, lengths, 64)
    assert packs.count == 5000 + 1000 + 999


@pytest.mark.parametrize("seed", range(6))
def test_uniform_lengths_lose_nothing(seed):
    source = np.random.default_rng(seed)
    longest = int(source.integers(16, 100))
    lengths = source.integers(1, longest + 1, int(source.integers(1, 5000)))
    check(pack(lengths, longest, seed), lengths, longest)


@pytest.mark.parametrize("total", [1, 2, 99, 100, 101, 130, 250])
def test_few_sequences_are_packed_well(total):
    """The optimum may use every way less than once: then all sequences go where they fit best."""
    lengths = wikipedia_like(np.random.default_rng(total), total, 512)
    packs = pack(lengths, 512, 0)
    fill = check(packs, lengths, 512)
    alone = np.count_nonzero(lengths > 256)  # no two of them share a row
    best = max(-(-lengths.sum() // 512), -(-total // 3), alone)
    assert best <= packs.count <= best + 2 + best // 8
    assert fill <= 1


@pytest.mark.parametrize(("length", "sizes"), [(512, [1] * 7), (256, [2, 2, 2, 1]), (300, [1] * 7), (170, [3, 3, 1])])
def test_equal_lengths(length, sizes):
    packs = pack(np.full(7, length), 512, 0)
    assert sorted(packs.sizes.tolist(), reverse=True) == sizes


def test_no_sequences_make_no_packs():
    assert pack(np.zeros(0, int), 512, 0).count == 0


def test_a_seed_draws_the_same_packs_and_another_seed_others():
    lengths = wikipedia_like(np.random.default_rng(0), 3000, 64)
    first, again, other = (pack(lengths, 64, seed).slots for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert (first != other).mean() > 0.9


def test_exact_ways_are_all_multisets_of_at_most_three_lengths():
    longest = 12
    expected = {
        tuple(sorted((a, b, c)))
        for a in range(longest + 1) for b in range(longest + 1) for c in range(longest + 1) if a + b + c == longest
    }  # fmt: skip
    combinations = [tuple(sorted(combination)) for combination in exact_combinations(longest).tolist()]
    assert len(combinations) == len(set(combinations))
    assert set(combinations) == expected
    assert len(exact_combinations(512)) == 22_102  # partitions of 512 into at most three parts


def test_a_plan_has_a_place_for_every_sequence():
    source = np.random.default_rng(3)
    counts = source.integers(0, 400, 96)
    plan = plan_packs(counts, 96)
    slots = np.zeros(97, int)
    for combination, repeats in zip(plan.combinations, plan.repeats, strict=True):
        np.add.at(slots, combination, repeats)
    at_least = np.cumsum(slots[:0:-1])
    assert (at_least >= np.cumsum(counts[::-1])).all()
    assert plan.combinations.sum(axis=1).max() <= 96


def test_the_best_fitting_pair_is_found():
    counts = np.zeros(100, int)
    counts[[59, 24, 14, 37, 1]] = 1  # 60 leaves 40: 25 + 15 fills it, 38 + 2 as well; then the other two
    plan = best_fit(counts, 100)
    assert sorted(sum(combination) for combination in plan.combinations.tolist()) == [40, 100]
    assert plan.repeats.tolist() == [1, 1]
