"""Raw files: types and shapes from their headers, and invalid files."""

import numpy as np
import pytest
import small_graph

from benchmarks.rgat import raw
from common.errors import ConfigError, DataError
from common.mlperf.fixed import benchmark_settings

FACTS = benchmark_settings("rgat")["facts"] | {"feature_size": 4, "classes": 3, "labelled": 20, "eval_share": 0.1}
SIZES = {
    "full": dict(zip(FACTS["node_types"], (30, 20, 5, 6, 4, 3), strict=True)),
    "tiny": {"paper": 8, "author": 7, "institute": 2, "fos": 3},
}


@pytest.fixture
def folder(tmp_path):
    return small_graph.write_raw(tmp_path / "raw")


@pytest.fixture
def igbh(monkeypatch):
    """IGBH with a handful of nodes."""
    monkeypatch.setattr(raw, "benchmark_settings", lambda name: {"facts": FACTS})
    monkeypatch.setattr(raw, "NODES", SIZES)


def write_igbh(folder, nodes):
    """All files of a published size; papers and authors without a header in the full one."""
    for name, count in nodes.items():
        (folder / name).mkdir(parents=True)
        values = np.zeros((count, 4), np.float32)
        path = folder / name / "node_feat.npy"
        values.tofile(path) if name in ("paper", "author") and len(nodes) == 6 else np.save(path, values)
    np.save(folder / "paper" / "node_label_2K.npy", np.zeros(nodes["paper"], np.float32))
    for relation in FACTS["relations"]:
        source, _, target = relation.split("__")
        if source in nodes and target in nodes:
            (folder / relation).mkdir()
            np.save(folder / relation / "edge_index.npy", np.zeros((9, 2), np.int64))
    return folder


def test_both_kinds_of_files_are_read(folder):
    opened = raw.open_raw(folder)
    assert opened.nodes == small_graph.NODES
    assert {name: array.rows for name, array in opened.edges.items()} == small_graph.EDGES
    for name, array in opened.features.items():
        np.testing.assert_array_equal(array.read(3, 7), small_graph.raw_features(folder, name)[3:7])
    np.testing.assert_array_equal(opened.labels.read(5, 9)[:, 0], small_graph.raw_labels(folder)[5:9])
    for name, array in opened.edges.items():
        assert array.dtype == (np.int32 if "fos" in name else np.int64)
        np.testing.assert_array_equal(array.read(10, 20), small_graph.raw_edges(folder, name)[10:20])


def test_edges_may_lie_column_by_column(folder):
    path = folder / "paper__topic__fos" / "edge_index.npy"
    expected = np.load(path)
    np.save(path, np.asfortranarray(expected))
    np.testing.assert_array_equal(raw.open_raw(folder).edges["paper__topic__fos"].read(7, 90), expected[7:90])


def test_a_folder_processed_is_looked_into(folder, tmp_path):
    (tmp_path / "outer").mkdir()
    folder.rename(tmp_path / "outer" / "processed")
    assert raw.open_raw(tmp_path / "outer").nodes == small_graph.NODES


def shorten(path):
    path.write_bytes(path.read_bytes()[:-4])


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("paper/node_feat.npy", shorten, r"no numpy header and 5,756 bytes, no whole number of rows of 48 bytes"),
        ("paper/node_label_2K.npy", shorten, r"has 119 rows and not 120"),
        ("author/node_feat.npy", shorten, r"has 4,444 bytes where its header says 4,448"),
        ("author/node_feat.npy", lambda path: np.save(path, np.zeros((90, 12))), r"holds <f8 where <f4 is expected"),
        ("author/node_feat.npy", lambda path: np.save(path, np.zeros((90, 11), np.float32)), r"array \(90, 11\) where"),
        ("author/node_feat.npy", lambda path: path.write_bytes(b""), r"has 0 rows; a type has 1 to"),
        ("author/node_feat.npy", lambda path: path.write_bytes(b"\x93NUMPY\x01"), r"has a damaged numpy header"),
        ("author/node_feat.npy", lambda path: path.unlink(), r"cannot be read: No such file"),
        (
            "paper__cites__paper/edge_index.npy",
            lambda path: path.write_bytes(b"1234" * 8),
            r"does not begin with numpy",
        ),
        ("paper__cites__paper/edge_index.npy", lambda path: np.save(path, np.zeros((4, 2))), r"holds <f8 where <i8 or"),
        ("paper__cites__paper/edge_index.npy", lambda path: np.save(path, np.zeros((2, 4), int)), r"array \(2, 4\)"),
        ("SYNTHETIC", lambda path: path.write_text("{"), r"SYNTHETIC is damaged"),
        ("SYNTHETIC", lambda path: path.write_text("{}"), r"SYNTHETIC has missing or invalid settings"),
        ("SYNTHETIC", lambda path: small_graph.mark(path.parent, labelled=121), r"121 of 120 nodes of type paper"),
        ("SYNTHETIC", lambda path: small_graph.mark(path.parent, labelled=0), r"SYNTHETIC has missing or invalid"),
        ("SYNTHETIC", lambda path: small_graph.mark(path.parent, classes=40_000), r"classes=40000: at most 32768"),
        ("SYNTHETIC", lambda path: small_graph.mark(path.parent, eval_share=0.5), r"are no shares of one set"),
        ("SYNTHETIC", lambda path: small_graph.mark(path.parent, relations=["paper__cites"]), r"is no relation"),
        ("SYNTHETIC", lambda path: small_graph.mark(path.parent, relations=["paper__a__fos"]), r"a type has no edges"),
    ],
)
def test_a_wrong_file_is_named(folder, name, damage, message):
    damage(folder / name)
    with pytest.raises(DataError, match=message) as caught:
        raw.open_raw(folder)
    assert str(caught.value).startswith(str(folder))


def test_a_file_that_becomes_shorter_is_noticed(folder):
    features = raw.open_raw(folder).features["paper"]
    shorten(features.path)
    with pytest.raises(DataError, match="ends 1 values too early"):
        features.read(110, 120)


def test_a_missing_folder_says_so(tmp_path):
    with pytest.raises(DataError, match="nowhere does not exist"):
        raw.open_raw(tmp_path / "nowhere")


def test_synthetic_data_have_no_published_size(folder):
    with pytest.raises(ConfigError, match=r"--size=tiny: .* holds synthetic data"):
        raw.open_raw(folder, "tiny")


def test_fingerprints_know_settings_and_content(folder, tmp_path):
    same = small_graph.write_raw(tmp_path / "same")
    assert raw.open_raw(same).fingerprint() == raw.open_raw(folder).fingerprint()
    other = small_graph.write_raw(tmp_path / "other", seed=1)
    assert raw.open_raw(other).fingerprint() != raw.open_raw(folder).fingerprint()
    small_graph.mark(same, train_share=0.5)
    assert raw.open_raw(same).fingerprint() != raw.open_raw(folder).fingerprint()


@pytest.mark.usefixtures("igbh")
@pytest.mark.parametrize(
    ("size", "requested", "labelled", "relations"),
    [("full", None, 20, 11), ("full", "full", 20, 11), ("tiny", None, 8, 7)],
)
def test_the_full_size_labels_its_first_papers_and_small_sizes_lack_venues(
    tmp_path, size, requested, labelled, relations
):
    opened = raw.open_raw(write_igbh(tmp_path / "raw", SIZES[size]), requested)
    assert (opened.name, opened.nodes, opened.labelled) == (f"IGBH-{size}", SIZES[size], labelled)
    assert len(opened.settings.schema.relations) == relations


@pytest.mark.usefixtures("igbh")
def test_another_number_of_papers_is_no_published_size(tmp_path):
    write_igbh(tmp_path / "raw", {**SIZES["tiny"], "paper": 9})
    with pytest.raises(DataError, match=r"has 9 rows and IGBH's sizes 30 \(full\), 8 \(tiny\)"):
        raw.open_raw(tmp_path / "raw")
    with pytest.raises(DataError, match=r"paper/node_feat.npy has 9 rows and not 8"):
        raw.open_raw(tmp_path / "raw", "tiny")


@pytest.mark.usefixtures("igbh")
def test_another_number_of_other_nodes_is_refused(tmp_path):
    write_igbh(tmp_path / "raw", {**SIZES["full"], "author": 19})
    with pytest.raises(DataError, match=r"author/node_feat.npy has 19 rows and not 20"):
        raw.open_raw(tmp_path / "raw")


def test_published_numbers_add_up():
    assert sum(raw.NODES["full"].values()) == 547_360_534
