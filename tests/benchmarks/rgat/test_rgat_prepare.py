"""The whole preparation against raw files that are renumbered by dictionaries of lists, and all that may go wrong."""

import json
import tracemalloc

import numpy as np
import pytest
import small_graph
import torch

from benchmarks.rgat import bucket_sort
from benchmarks.rgat import prepare as prepare_module
from benchmarks.rgat.graph import Relation
from benchmarks.rgat.prepare import COMMANDS, prepare
from benchmarks.rgat.prepared import open_prepared, split_sizes, verify
from benchmarks.rgat.raw import RawArray
from common.data import manifest
from common.errors import ConfigError, DataError

STAGES = [
    (bucket_sort, "write_feature_piece"),
    (bucket_sort, "write_feature_bucket"),
    (bucket_sort, "write_edge_piece"),
    (bucket_sort, "write_edge_bucket"),
    (prepare_module, "write_seeds"),
    (prepare_module, "checksum"),
]
LITTLE = 1500  # bytes: pieces of 30 rows and of 31 edges


@pytest.fixture(scope="module", autouse=True)
def hurried_disk():
    """Nothing waits for the disk: a thousand small files are written here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fsync", lambda file: None)
        patch.setattr("os.fdatasync", lambda file: None)
        yield


@pytest.fixture(scope="module")
def raw_dir(tmp_path_factory):
    return small_graph.write_raw(tmp_path_factory.mktemp("raw"))


@pytest.fixture(scope="module")
def data(raw_dir, tmp_path_factory):
    """Prepared at once, with much memory, and not to be changed."""
    folder = tmp_path_factory.mktemp("data")
    prepare(raw_dir, folder)
    return folder


@pytest.fixture
def own_raw(tmp_path):
    return small_graph.write_raw(tmp_path / "raw")


def change(path, row, value):
    """Write ``value`` to a row of a file with or without a header."""
    array = np.load(path, mmap_mode="r+") if path.read_bytes()[:1] == b"\x93" else np.memmap(path, np.float32, "r+")
    array[row] = value
    array.flush()


def describe_anew(folder, **source):
    """Let the manifest agree with the files as they are."""
    found = json.loads((folder / "manifest.json").read_text())
    for name in found["files"]:
        entry = manifest.file_entry(folder / name)
        found["files"][name] = {"bytes": entry.bytes, "sha256": entry.sha256}
    found["source"].update(source)
    (folder / "manifest.json").write_text(json.dumps(found))


def test_features_are_those_of_the_same_nodes_converted(raw_dir, data):
    for name, numbers in small_graph.permutations().items():
        found = np.load(data / f"features/{name}.npy")
        expected = torch.from_numpy(small_graph.raw_features(raw_dir, name)).to(torch.float8_e4m3fn).view(torch.uint8)
        np.testing.assert_array_equal(found[numbers], expected.numpy())


def test_edges_are_those_of_the_augmented_graph_in_their_order(raw_dir, data):
    numbers = small_graph.permutations()
    for relation, expected in small_graph.augmented(raw_dir).items():
        source, _, target = relation.split("__")
        indptr, indices = (np.load(data / f"graph/{relation}/{kind}.npy") for kind in ("indptr", "indices"))
        assert (indptr.dtype, indices.dtype, len(indptr)) == (np.int64, np.int32, small_graph.NODES[target] + 1)
        for node, sources in expected.items():
            new = numbers[target][node]
            assert indices[indptr[new] : indptr[new + 1]].tolist() == numbers[source][sources].tolist()
        assert indptr[0] == 0
        assert indptr[-1] == len(indices) == sum(len(sources) for sources in expected.values())


def test_seeds_are_the_split_of_the_labelled_renumbered(raw_dir, data):
    torch.manual_seed(42)
    drawn = torch.randperm(small_graph.LABELLED).numpy()
    assert drawn[:6].tolist() == [42, 96, 62, 98, 46, 95]
    new, labels = small_graph.permutations()["paper"], small_graph.raw_labels(raw_dir)
    for split, ids in (("train", drawn[:60]), ("eval", drawn[60:80])):
        found, classes = np.load(data / f"seeds/{split}.npy"), np.load(data / f"seeds/{split}_labels.npy")
        assert (found.dtype, classes.dtype) == (np.int32, np.int16)
        assert found.tolist() == new[ids].tolist()
        assert classes.tolist() == labels[ids].tolist()


@pytest.mark.parametrize("kind", [np.int64, np.float64])
def test_labels_may_have_a_header_and_another_dtype(own_raw, data, tmp_path, kind):
    path = own_raw / "paper" / "node_label_2K.npy"
    labels = small_graph.raw_labels(own_raw)
    labels[100:] = 7  # beyond the labelled
    np.save(path, labels.astype(kind))
    prepare(own_raw, tmp_path / "data")
    for split in ("train", "eval"):
        found = np.load(tmp_path / f"data/seeds/{split}_labels.npy")
        np.testing.assert_array_equal(found, np.load(data / f"seeds/{split}_labels.npy"))


def test_the_benchmarks_split_has_the_published_sizes():
    assert split_sizes(157_675_969, 0.6, 0.005) == {"train": 94_605_581, "eval": 788_379}


@pytest.mark.parametrize("bins", [1 << 20, 16])
def test_little_memory_makes_the_same_bytes(raw_dir, data, tmp_path, monkeypatch, bins):
    """Ranges of one target, whose edges are more than the memory holds, and of several."""
    monkeypatch.setattr(bucket_sort, "_BINS", bins)
    prepare(raw_dir, tmp_path, memory_gb=LITTLE / 1e9)
    assert small_graph.contents(tmp_path) == small_graph.contents(data)


@pytest.mark.usefixtures("forked_pools")
def test_workers_change_nothing(raw_dir, data, tmp_path, monkeypatch):
    monkeypatch.setattr(prepare_module, "BYTES_PER_WORKER", 1)
    prepare(raw_dir, tmp_path, 2, memory_gb=12 * LITTLE / 1e9)
    assert small_graph.contents(tmp_path) == small_graph.contents(data)


@pytest.mark.usefixtures("forked_pools")
def test_a_bad_row_ends_all_workers_with_its_name(own_raw, tmp_path, monkeypatch):
    monkeypatch.setattr(prepare_module, "BYTES_PER_WORKER", 1)
    change(own_raw / "paper" / "node_feat.npy", 77 * small_graph.WIDTH + 3, np.inf)
    with pytest.raises(DataError, match=r"paper/node_feat.npy: row 77 has the feature inf at 3"):
        prepare(own_raw, tmp_path / "data", 2, memory_gb=4 * LITTLE / 1e9)


@pytest.mark.parametrize(("module", "name"), STAGES)
def test_what_was_interrupted_continues_to_the_same_bytes(raw_dir, data, tmp_path, monkeypatch, module, name):
    original, calls = getattr(module, name), []

    def third_fails(*arguments):
        calls.append(arguments)
        if len(calls) == 3 or name == "write_seeds":
            raise DataError("the cable fell out")
        return original(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(module, name, third_fails)
        with pytest.raises(DataError, match="the cable fell out"):
            prepare(raw_dir, tmp_path, memory_gb=16 * LITTLE / 1e9)
    assert not (tmp_path / "manifest.json").exists()
    before = len(calls)
    monkeypatch.setattr(module, name, lambda *arguments: calls.append(arguments) or original(*arguments))
    # Another memory does not move pieces that are there already.
    prepare(raw_dir, tmp_path, memory_gb=LITTLE / 1e9)
    assert small_graph.contents(tmp_path) == small_graph.contents(data)
    assert not list(tmp_path.rglob("*.partial"))
    assert not (tmp_path / "intermediate").exists()
    done = {repr(arguments) for arguments in calls[: before - 1]}
    assert not done & {repr(arguments) for arguments in calls[before:]}


@pytest.mark.parametrize("lost", ["features/author.npy", "graph/paper__topic__fos/indices.npy", "seeds/train.npy"])
def test_a_file_that_was_lost_on_the_way_is_made_again(raw_dir, data, tmp_path, monkeypatch, lost):
    with monkeypatch.context() as patch:
        patch.setattr(manifest, "write", lambda *arguments: (_ for _ in ()).throw(DataError("no power")))
        with pytest.raises(DataError, match="no power"):
            prepare(raw_dir, tmp_path)
    (tmp_path / lost).unlink()
    prepare(raw_dir, tmp_path)
    assert small_graph.contents(tmp_path) == small_graph.contents(data)
    verify(tmp_path)


@pytest.mark.parametrize("memory", [LITTLE, 1 << 30])
def test_damaged_files_are_prepared_anew_without_their_manifest(raw_dir, data, tmp_path, memory):
    prepare(raw_dir, tmp_path)
    (tmp_path / "manifest.json").unlink()
    for name in small_graph.FILES[:-1]:
        content = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(content[:-8] + b"12345678")
    (tmp_path / small_graph.FILES[-1]).unlink()
    prepare(raw_dir, tmp_path, memory_gb=memory / 1e9)
    assert small_graph.contents(tmp_path) == small_graph.contents(data)
    verify(tmp_path)


def test_pieces_keep_to_their_memory(tmp_path):
    """Arrays of numpy's alone, which are nearly all: beside them a block is read, and converted."""
    count, memory = 100_000, 4 << 20
    edges = memory // bucket_sort.EDGE_MEMORY
    random = np.random.default_rng(0)
    values = np.stack([random.integers(count, size=100_000) for _ in range(2)], axis=1)
    np.save(tmp_path / "edges.npy", values)
    bucket_sort.write_permutations(tmp_path / "permutations", {"paper": count, "author": count})
    array = RawArray(tmp_path / "edges.npy", 128, np.dtype(np.int64), len(values), 2)
    relation = Relation("paper", "written_by", "author")
    made = [bucket_sort.SortedEdges(tmp_path / name, count) for name in ("forward", "backward")]
    tracemalloc.start()
    bucket_sort.write_edge_piece(
        array, tmp_path / "permutations", relation, 0, memory // bucket_sort.EDGE_MEMORY, *made
    )
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < memory + edges * 40  # the block that is read, and what is compared of it


def test_sorting_is_stable_beyond_16_bits():
    keys = np.random.default_rng(0).integers(300_000, size=5000).astype(np.int32) // 7 * 7
    assert bucket_sort.stable_order(keys, 300_000).tolist() == sorted(range(5000), key=lambda place: keys[place])


def decoded(bits):
    """e4m3 by its definition: sign, 4 bits of exponent with bias 7, 3 of mantissa; 0x7f and 0xff are no numbers."""
    sign, exponent, mantissa = np.where(bits & 0x80, -1.0, 1.0), (bits >> 3 & 15).astype(int), bits & 7
    small = mantissa * 2.0**-9
    return sign * np.where(exponent == 0, small, (1 + mantissa / 8) * 2.0 ** (exponent - 7))


def test_float8_is_the_nearest_value_and_the_largest_beyond_the_range():
    random = np.random.default_rng(0)
    values = (random.standard_normal(20_000) * 2.0 ** random.uniform(-12, 12, 20_000)).astype(np.float32)
    values[:6] = [448, -448, 465, -1e30, 3e38, 0]
    bits = bucket_sort.to_e4m3(values.copy())
    assert bits.dtype == np.uint8
    assert not np.isin(bits, [0x7F, 0xFF]).any()
    found, exact = decoded(bits), values.astype(np.float64)
    every = decoded(np.array([code for code in range(256) if code & 0x7F != 0x7F], np.uint8))
    np.testing.assert_array_equal(np.abs(found - exact), np.abs(exact[:, None] - every).min(axis=1))


def test_a_run_opens_what_was_prepared(data):
    opened = open_prepared(data)
    assert [str(relation) for relation in opened.schema.relations] == [
        "paper__cites__paper",
        "paper__written_by__author",
        "paper__topic__fos",
        "author__rev_written_by__paper",
        "fos__rev_topic__paper",
    ]
    assert opened.nodes == (120, 90, 7)
    assert opened.edges[1:] == (300, 200, 300, 200)
    assert (opened.settings.feature_size, opened.settings.classes, opened.labelled) == (12, 5, 100)
    assert opened.seeds == {"train": 60, "eval": 20}
    assert opened.manifest.synthetic
    found = opened.labelled_seeds("eval")
    np.testing.assert_array_equal(found.nodes, np.load(data / "seeds/eval.npy"))
    np.testing.assert_array_equal(found.labels, np.load(data / "seeds/eval_labels.npy"))


def test_a_relation_may_be_empty(own_raw, tmp_path):
    np.save(own_raw / "paper__topic__fos" / "edge_index.npy", np.zeros((0, 2), np.int64))
    prepare(own_raw, tmp_path / "data")
    assert np.load(tmp_path / "data/graph/fos__rev_topic__paper/indptr.npy").tolist() == [0] * 121
    assert verify(tmp_path / "data").counts["fos__rev_topic__paper_edges"] == 0


@pytest.mark.parametrize(
    ("name", "row", "value", "message"),
    [
        (
            "paper__cites__paper/edge_index.npy",
            650,
            (3, 120),
            r"row 650 has the target 120, and there are 120 nodes of",
        ),
        (
            "paper__cites__paper/edge_index.npy",
            31,
            (-1, 5),
            r"row 31 has the source -1, and there are 120 nodes of type",
        ),
        (
            "paper__written_by__author/edge_index.npy",
            0,
            (3, 90),
            r"row 0 has the target 90, and .* 90 nodes of type auth",
        ),
        ("paper/node_label_2K.npy", 99, 5, r"row 99 has the label 5 of 5 classes"),
        ("paper/node_label_2K.npy", 0, -1, r"row 0 has the label -1 of"),
        ("paper/node_label_2K.npy", 8, 1.5, r"row 8 has the label 1.5 of"),
        ("paper/node_label_2K.npy", 9, np.nan, r"row 9 has the label nan of"),
        ("author/node_feat.npy", (60, 4), np.nan, r"author/node_feat.npy: row 60 has the feature nan at 4"),
        ("author/node_feat.npy", (0, 0), -np.inf, r"row 0 has the feature -inf at 0"),
    ],
)
def test_bad_raw_data_are_named(own_raw, tmp_path, name, row, value, message):
    change(own_raw / name, row, value)
    with pytest.raises(DataError, match=message):
        prepare(own_raw, tmp_path / "data", memory_gb=LITTLE * 4 / 1e9)
    assert not (tmp_path / "data" / "manifest.json").exists()


def test_a_split_without_seeds_is_refused(own_raw, tmp_path):
    small_graph.mark(own_raw, eval_share=0.005)
    with pytest.raises(DataError, match="100 labelled nodes leave none for eval"):
        prepare(own_raw, tmp_path / "data")


def test_data_with_features_of_another_dtype_are_refused(raw_dir, own_data):
    settings = json.loads((own_data / "manifest.json").read_text())["source"]["settings"]
    describe_anew(own_data, settings=settings.replace("float8", "float16"))
    with pytest.raises(DataError, match=r"was prepared with .*float16.*, not with .*float8"):
        prepare(raw_dir, own_data)
    with pytest.raises(DataError, match=r"features=float16, where training reads float8; run 'mlperf-suite prepare"):
        open_prepared(own_data)


@pytest.mark.parametrize(
    ("memory", "needed"), [("0", "0.0: at least 1e-09"), ("nan", "nan: a finite number"), ("inf", "inf: a fin")]
)
def test_no_memory_is_refused(raw_dir, tmp_path, memory, needed):
    with pytest.raises(ConfigError, match=f"--memory-gb={needed}"):
        COMMANDS.run("prepare", ["--raw-dir", str(raw_dir), "--data-dir", str(tmp_path), "--memory-gb", memory])


@pytest.fixture
def own_data(raw_dir, tmp_path):
    prepare(raw_dir, tmp_path / "data")
    return tmp_path / "data"


def test_features_of_another_dtype_are_refused(own_data):
    path = own_data / "features/fos.npy"
    np.save(path, np.zeros((7, 12), "|i1"))  # as many bytes
    with pytest.raises(DataError, match=r"fos.npy holds \|i1 \(7, 12\) where manifest.json says \|u1 \(7, 12\)"):
        open_prepared(own_data)


def test_seeds_of_another_permutation_are_refused(own_data):
    path = own_data / "seeds/train.npy"
    np.save(path, np.load(path)[::-1].copy())
    with pytest.raises(DataError, match="holds seeds of another permutation or split"):
        open_prepared(own_data)


def test_a_manifest_without_its_settings_is_refused(own_data):
    describe_anew(own_data, settings="{}")
    with pytest.raises(DataError, match=r"manifest.json has no valid 'labelled'"):
        open_prepared(own_data)


@pytest.mark.parametrize(
    ("name", "row", "value", "message"),
    [
        ("graph/paper__topic__fos/indptr.npy", 0, 1, r"begins with 1 and not with 0"),
        ("graph/paper__topic__fos/indptr.npy", 3, 10**6, r"indptr.npy falls at 4"),
        ("graph/paper__topic__fos/indptr.npy", 7, 10**6, r"ends at 1,000,000 and there are 200 edges"),
        ("graph/paper__topic__fos/indices.npy", 5, 120, r"indices.npy has 120 at 5, and there are 120"),
        ("graph/paper__topic__fos/indices.npy", 5, -1, r"indices.npy has -1 at 5"),
        ("seeds/eval_labels.npy", 2, 5, r"eval_labels.npy has 5 at 2, and there are 5"),
        ("seeds/train.npy", 2, 120, r"train.npy has 120 at 2, and there are 120"),
        ("seeds/train.npy", 2, 3, r"train.npy: from 0 on, not the seeds that split and permutation draw"),
    ],
)
def test_content_that_cannot_be_is_found(own_data, name, row, value, message):
    change(own_data / name, row, value)
    describe_anew(own_data, seeds=prepare_module.seeds_mark(own_data))
    with pytest.raises(DataError, match=message):
        verify(own_data)
