"""A file has its name only when it is complete."""

from contextlib import suppress

from common.data import atomic


def test_the_file_and_its_folder_are_there_when_the_block_has_ended(tmp_path):
    path = tmp_path / "a" / "b" / "file.npy"
    with atomic.written(path) as beside:
        beside.write_bytes(b"new")
        assert beside.parent == path.parent
        assert not path.exists()
    assert path.read_bytes() == b"new"
    assert list(path.parent.iterdir()) == [path]


def test_a_block_that_fails_leaves_the_earlier_file(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with suppress(OSError), atomic.written(path) as beside:
        beside.write_bytes(b"ha")
        raise OSError(28, "No space left on device")
    assert path.read_bytes() == b"old"


def test_a_partial_file_of_an_earlier_attempt_is_replaced(tmp_path):
    path = tmp_path / "file"
    with suppress(KeyError), atomic.written(path) as beside:
        beside.write_bytes(b"longer than the second")
        raise KeyError
    atomic.write_text(path, "zwölf")
    assert path.read_bytes() == b"zw\xc3\xb6lf"
    assert list(tmp_path.iterdir()) == [path]
