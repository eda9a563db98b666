"""From extracted articles to text parts: markup, sentences, held-out articles."""

import random

import pytest

from benchmarks.bert.preparation.articles import SentenceSplitter, clean, read_lines
from benchmarks.bert.preparation.holdout import assign, held_out, join, sentences_of, split_file
from common.errors import DataError


def article(number, title, *paragraphs):
    body = "\n\n".join(paragraphs)
    url = f"https://en.wikipedia.org/wiki?curid={number}"
    return f'<doc id="{number}" url="{url}" title="{title}">\n{title}\n\n{body}\n\n</doc>\n'


def test_articles_are_an_empty_line_and_their_paragraphs_without_the_title(tmp_path):
    path = tmp_path / "wiki_00"
    path.write_text(
        article(12, 'The "River" <1>', "It flows.", 'The "River" <1>', " ", "")
        + article(13, "Void")
        + article(14, "T", "End.")
    )
    assert list(read_lines(path)) == ["", "It flows.", 'The "River" <1>', " ", "", "", "End."]


def test_a_title_with_a_plain_ampersand_is_removed(tmp_path):
    path = tmp_path / "wiki_00"
    path.write_text(article(1, "AT&amp;T", "A company.").replace("\nAT&amp;T\n", "\nAT&T\n"))
    assert list(read_lines(path)) == ["", "A company."]


# Worked by hand, one substitution of the script after the other.
@pytest.mark.parametrize(
    ("markup", "plain"),
    [
        ("no markup [at all] here", "no markup at all here"),
        ("the [[river]] and the [[Old Town|town]]", "the river and the town"),
        ("a [[one|two [[three|four]]]] b", "a two four b"),
        ("[[Category:Rivers of France]] and more", None),
        ("[[category:small]]", "category:small"),
        ("see [[File:map.png|thumb|a map]] there", "see  there"),
        ("see [[File:map.png|a map]] there", "see a map there"),
        ("see [[Image:map.png]] there", "see Image:map.png there"),
        ("see [[a|b|c]] there", "see  there"),
        ("see [a|b] there", "see [a|b] there"),
        ("an image alt=Map of it", "an image Map of it"),
        ("x<ref>Smith 1999</ref> y<ref name=a/> z<br>", "x y z"),
        ("x<Ref name=a>Smith</Ref>", "xSmith</Ref>"),
        ("x<references group=a/>", "x"),
        ("one<br/>two<br />three<BR>four", "one<br/>two<br />threefour"),
        ("water H<sub>2</sub>O, x<sup>2</sup>", "water H<sub>2</sub>O, x2"),
        ("<chem>H2O</chem> is water", ">H2O is water"),
        ("<ins>new</ins> text", ">new text"),
        ("<del>old</del> text", "old text"),
        ("<math>x < 2</math>", "x < 2"),
        ("<templatestyles src='x'/>Text", "<templatestyles src='x'/>Text"),
        ("<https://example.org> 1 < 2 > 0", " 1 < 2 > 0"),
        ("<section begin=a/>kept?<section end=a/> b", " b"),
        ('<div style="x">a</div>', "a"),
        ("<mapframe width=2/>a<mapframe>b</mapframe>", "ab"),
        ("<graph>{1}</graph>a<graph>{", "a"),
        ("<includeonly>no</includeonly>a<onlyinclude>b</onlyinclude>", "ab"),
        ('<poem lang="de">a</poem>', "a"),
        ("  two  spaces ", "  two  spaces "),
        ("[[File:a.png|thumb|b]]", ""),
    ],
)
def test_markup_is_substituted_as_the_cleaning_script_does_in_its_order(markup, plain):
    assert clean(markup) == plain


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("words\n" + article(1, "T", "x"), "line 1 is outside"),
        (article(1, "T", "x").replace("</doc>\n", ""), "ends within the article 'T'"),
    ],
)
def test_other_files_are_errors(tmp_path, text, message):
    (tmp_path / "wiki_00").write_text(text)
    with pytest.raises(DataError, match=message):
        list(read_lines(tmp_path / "wiki_00"))


def test_articles_that_are_not_utf_8(tmp_path):
    (tmp_path / "wiki_00").write_bytes(article(1, "T", "x").encode() + b"\xe9\n")
    with pytest.raises(DataError, match="wiki_00 is not UTF-8"):
        list(read_lines(tmp_path / "wiki_00"))


def test_sentences_end_at_full_stops():
    splitter = SentenceSplitter(None)
    assert splitter.split(" It rains.  Does it? Yes!\tIt\u00a0does. ") == [
        "It rains.",
        "Does it?",
        "Yes!",
        "It\u00a0does.",
    ]
    assert splitter.split("Two  spaces\tand a tab") == ["Two  spaces\tand a tab"]
    assert splitter.split("  ") == []
    assert splitter.split("") == []


def test_trained_parameters_know_abbreviations(tmp_path):
    (tmp_path / "collocations.tab").write_text("a\tb\n")
    (tmp_path / "sent_starters.txt").write_text("however\n")
    (tmp_path / "abbrev_types.txt").write_text("dr\n")
    (tmp_path / "ortho_context.tab").write_text("smith\t46\n")
    assert SentenceSplitter(tmp_path).split("It was Dr. Smith. He left.") == ["It was Dr. Smith.", "He left."]
    assert len(SentenceSplitter(None).split("It was Dr. Smith. He left.")) == 3


def test_missing_parameters_are_named(tmp_path):
    with pytest.raises(DataError, match="holds no parameters of Punkt"):
        SentenceSplitter(tmp_path / "nowhere")


def test_the_held_out_pieces_are_those_of_the_rule(tmp_path):
    files, wanted, pieces = 7, 23, 9
    total = 0
    for number in range(files):
        share = int((number + 1) * wanted / files) - int(number * wanted / files)
        source, expected = random.Random(12345 + 13 * number), []
        while len(expected) < share:
            new = int(source.random() * pieces)
            if new not in expected:
                expected.append(new)
        assert held_out(number, files, wanted, pieces, tmp_path) == set(expected)
        total += share
    assert total == wanted
    with pytest.raises(DataError, match="has 2 articles where 3 are held out"):
        held_out(0, 7, 23, 2, tmp_path)


def test_the_last_empty_piece_can_be_held_out(tmp_path):
    """Three articles are four pieces. random.Random(12345) begins with 0.41661987254534116, 0.010169169457068361,
    0.8252065092537432: places 1, 0 and 3 of four, where three articles would give 1, 0 and 2."""
    path = tmp_path / "wiki_00"
    path.write_text("".join(article(n, f"T{n}", f"First of {n}. Second  [[of]] {n}.", "Third.") for n in range(3)))
    record = split_file(path, 0, 1, 3, None, tmp_path / "train", tmp_path / "eval")
    first, second, third = (f"First of {n}.\nSecond  of {n}.\nThird." for n in range(3))
    assert (tmp_path / "eval").read_text() == f"\n{first}\n\n{second}\n\n\n\n"
    assert (tmp_path / "train").read_text() == f"{third}\n"
    assert record == {"articles": 1, "held_out": 3, "bytes": len(third) + 1}


def test_a_paragraph_that_vanishes_ends_the_article_there_and_a_category_does_not(tmp_path):
    path = tmp_path / "wiki_00"
    path.write_text(article(1, "T", "One.", "[[File:a|b|c]]", "Two.", "[[Category:a]]", "Three.") + article(2, "Void"))
    # an empty line before each article and after the last; none of a line of blanks
    assert sentences_of(path, SentenceSplitter(None)) == "\nOne.\n\nTwo.\nThree.\n\n\n"
    path.write_text(article(1, "T", "One.", "  ", "Two."))
    assert sentences_of(path, SentenceSplitter(None)) == "\nOne.\nTwo.\n\n"


def test_training_text_ends_with_one_line_feed_less(tmp_path):
    """The script that gathers parts cuts one of two; the first article of the next file brings an empty line along."""
    path = tmp_path / "wiki_00"
    path.write_text(article(1, "T", "One.") + article(2, "U", "Two."))
    split_file(path, 0, 2, 1, None, tmp_path / "train", tmp_path / "eval")  # int(1 / 2) = 0 are held out
    assert (tmp_path / "eval").read_text() == ""
    assert (tmp_path / "train").read_text() == "\nOne.\n\nTwo.\n\n\n"


@pytest.mark.parametrize(("files", "parts"), [(1, 1), (5, 5), (12, 5), (100, 7)])
def test_parts_are_neighbouring_files_of_about_the_same_size(files, parts):
    source = random.Random(files)
    sizes = [source.randint(900, 1100) for _ in range(files)]
    groups = assign(sizes, parts)
    assert [number for group in groups for number in group] == list(range(files))
    assert len(groups) == parts
    bytes_of = [sum(sizes[number] for number in group) for group in groups]
    assert min(bytes_of) > 0
    assert max(bytes_of) - min(bytes_of) <= 2.2 * max(sizes)


def test_one_huge_file_leaves_every_part_a_file():
    assert [len(group) for group in assign([10_000, 1, 1], 3)] == [1, 1, 1]
    assert [len(group) for group in assign([1, 1, 10_000], 3)] == [1, 1, 1]
    with pytest.raises(DataError, match="2 files of articles cannot make 3 parts"):
        assign([1, 1], 3)


def test_joined_files_follow_one_another_as_they_are(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).write_text(f"{name}.\n\n")
    join([tmp_path / "a", tmp_path / "b"], tmp_path / "out")
    assert (tmp_path / "out").read_text() == "a.\n\nb.\n\n"
