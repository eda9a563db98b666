"""Test CLIP's tokenizer against Transformers and OpenCLIP."""

import gzip
import pickle
import random
from pathlib import Path

import ftfy
import pytest
import torch
from transformers import CLIPTokenizer

from benchmarks.stable_diffusion.frozen.clip_tokenizer import BYTE_TOKENS, ClipTokenizer, byte_characters, read_merges
from benchmarks.stable_diffusion.synthetic_networks import small_merges
from common.errors import DataError

CAPTIONS = [
    "a red circle on a blue background",
    "It's  the 1990s,\tDON'T you'Ve ... 100% ②½ Ⅷ",
    "日本語 テキスト ñandú naïve e\u0301 café Große ŁÓDŹ",
    "!!!'s -- 'll ''t (what?!)",
    "",
    "  \n ",
    "emoji 😀👍🏽 flag 🇩🇪 \u200b",
]
MERGES = 40
VOCABULARY = BYTE_TOKENS + MERGES + 2


@pytest.fixture(scope="module")
def merges(tmp_path_factory):
    path = tmp_path_factory.mktemp("merges") / "bpe.txt.gz"
    path.write_bytes(small_merges(CAPTIONS, MERGES))
    return path


@pytest.fixture(scope="module")
def tokenizer(merges):
    return ClipTokenizer(merges, VOCABULARY, context=200)


@pytest.fixture(scope="module")
def theirs(merges):
    characters = list(byte_characters().values())
    pairs = read_merges(merges, MERGES)
    marks = ["<|startoftext|>", "<|endoftext|>"]
    tokens = [*characters, *(f"{one}</w>" for one in characters), *(a + b for a, b in pairs), *marks]
    return CLIPTokenizer(vocab={token: number for number, token in enumerate(tokens)}, merges=pairs)


def random_texts(count):
    pool = "abcXYZ 123'\u2019!?.,-_&;<>|éßøЖд中あ😀\t\n\xa0\u2009²½ǅ\u02bc\u0301 aredcirclebackground"
    generator = random.Random(0)
    return ["".join(generator.choices(pool, k=generator.randint(1, 60))) for _ in range(count)]


def test_ids_equal_transformers(tokenizer, theirs):
    for caption in CAPTIONS + [caption for caption in random_texts(500) if "&" not in caption]:
        expected = theirs(ftfy.fix_text(caption))["input_ids"]
        row = tokenizer([caption])[0].tolist()
        assert row[: len(expected)] == expected, caption
        assert not any(row[len(expected) :])


def test_only_known_pairs_are_merged(tokenizer):
    assert len(tokenizer.encode("background")) < len("background")
    assert len(tokenizer.encode("zzzz")) == 4


def test_ids_follow_the_order_of_the_file(tmp_path):
    path = tmp_path / "bpe.txt.gz"
    path.write_bytes(gzip.compress(b"#version: 0.2\na b\nab c</w>\nignored pair\n"))
    tokenizer = ClipTokenizer(path, BYTE_TOKENS + 2 + 2, context=8)
    begin, end, first = BYTE_TOKENS + 2, BYTE_TOKENS + 3, BYTE_TOKENS

    a, b, c = (ord(letter) - ord("!") for letter in "abc")
    last = 256  # added to the last byte of a word

    assert tokenizer(["ABC ab", "cb", ""]).tolist() == [
        [begin, first + 1, a, b + last, end, 0, 0, 0],
        [begin, c, b + last, end, 0, 0, 0, 0],
        [begin, end, 0, 0, 0, 0, 0, 0],
    ]


def test_long_texts_are_truncated_and_have_an_end(merges):
    tokenizer = ClipTokenizer(merges, VOCABULARY, 77)
    long = tokenizer(["red " * 200, "z " * 75, "z " * 76])

    assert long.shape == (3, 77)
    assert long.dtype == torch.int64
    assert long[:, 0].tolist() == [VOCABULARY - 2] * 3
    assert long[:, -1].tolist() == [VOCABULARY - 1] * 3
    assert long[1, 1:-1].unique().numel() == 1
    assert torch.equal(long[1], long[2])


def test_entities_are_unescaped_twice(tokenizer):
    assert tokenizer.encode("&amp;lt;b&gt; &amp;") == tokenizer.encode("<b> &")


def test_marks_in_a_text_are_single_tokens(tokenizer):
    assert tokenizer.encode("<end_of_text>") == [VOCABULARY - 1]
    assert tokenizer.encode("<start_of_text> a")[0] == VOCABULARY - 2


def test_the_tokenizer_can_be_pickled(tokenizer):
    assert pickle.loads(pickle.dumps(tokenizer))(CAPTIONS).equal(tokenizer(CAPTIONS))


def test_tokens_equal_open_clips_with_the_published_merges():
    theirs = pytest.importorskip("open_clip.tokenizer")
    ours = ClipTokenizer(Path(theirs.default_bpe()), 49408, 77)
    captions = [
        *CAPTIONS,
        *random_texts(300),
        "\u2018curly\u2019 “quotes” — dash… ﬁ \uff46\uff55\uff4c\uff4c",
        "<end_of_text>!<start_of_text>",
        "a " * 200,
    ]

    assert torch.equal(ours(captions), theirs.SimpleTokenizer()(captions))


@pytest.mark.parametrize(
    ("caption", "repaired"),
    [
        ("sch\u00c3\u00b6n caf\u00c3\u00a9", "sch\u00f6n caf\u00e9"),
        ("it\u00e2\u20ac\u2122s a \u201cred\u201d one", 'it\'s a "red" one'),
        ("\uff46\uff55\uff4c\uff4c \ufb01sh", "full fish"),
        ("e\u0301t\u00e9", "\u00e9t\u00e9"),
        ("red\x1b[31m\x07 circle\u2028blue", "red circle blue"),
        ("&lt;b&gt; &amp;amp; caf&eacute;", "<b> & caf\u00e9"),
    ],
    ids=["mojibake", "quotes", "widths and ligatures", "composed", "control characters", "entities"],
)
def test_captions_are_repaired_like_in_the_reference(tokenizer, caption, repaired):
    """The repaired texts follow from the documentation of ``ftfy.fix_text`` and ``html.unescape``."""
    assert tokenizer.encode(caption) == tokenizer.encode(repaired)
    assert repaired.isascii() or ftfy.fix_text(repaired) == repaired
    symbols = [token for word in repaired.split() for token in tokenizer.encode(word)]
    assert tokenizer.encode(repaired) == symbols


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"no gzip", r"bpe\.txt\.gz cannot be read as gzip"),
        (gzip.compress(b"#version\na b\nb c\n")[:-9], r"bpe\.txt\.gz cannot be read as gzip"),
        (gzip.compress(b"#version\na b\n\xff\xfe\n"), r"bpe\.txt\.gz cannot be read as gzip"),
        (gzip.compress(b"#version\na b\n"), "has 1 merges, but a vocabulary of 516 needs 2"),
        (gzip.compress(b"#version\na b\na b c\n"), "line 3 has 3 symbols"),
        (gzip.compress(b"#version\na bc\nab c\n"), "two merges make the same token"),
    ],
    ids=["no gzip", "cut off", "no UTF-8", "too few", "three symbols", "twice"],  # the bytes contain the time
)
def test_damaged_merges_are_refused(tmp_path, content, message):
    path = tmp_path / "bpe.txt.gz"
    path.write_bytes(content)

    with pytest.raises(DataError, match=message):
        ClipTokenizer(path, BYTE_TOKENS + 2 + 2, 77)


def test_missing_merges_are_an_error_with_the_path(tmp_path):
    with pytest.raises(DataError, match=r"bpe\.txt\.gz"):
        ClipTokenizer(tmp_path / "bpe.txt.gz", VOCABULARY, 77)
