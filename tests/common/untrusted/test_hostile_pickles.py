"""Pickles, files of torch.save and safetensors that ask for memory, time or a deep stack end in one message."""

from __future__ import annotations

import pickle
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

from common.errors import DataError
from common.untrusted.pickle_scan import Excessive, scan
from common.untrusted.pickled_arrays import load_arrays
from common.untrusted.tensor_file import read_state
from tests.common.untrusted.hostile import complaints

TEXT = b"X" + struct.pack("<I", 2**20) + b"a" * 2**20
"""A text of 1 MiB."""

PICKLES = {
    "memo index of 2 billion": b"\x80\x02Nr\xff\xff\xff\x7f.",
    "memo index in decimal": b"\x80\x02Np2000000000\n.",
    "key of a nested tuple": b"\x80\x02}N" + b"\x85" * 100_000 + b"Ns.",
    "key that doubles 60 times": b"\x80\x02}N\x85" + b"q\x00h\x00\x86" * 60 + b"Ns.",
    "tuple nested in state": b"\x80\x02" + b"N" + b"\x85" * 100_000 + b".",
    "lists nested 10 million deep": b"\x80\x02" + b"](" * 10_000_000 + b"e" * 10_000_000 + b".",
    "10 million dicts": b"\x80\x02](" + b"}" * 10_000_000 + b"e.",
    "10 million sets": b"\x80\x04](" + b"\x8f" * 10_000_000 + b"e.",
    "20 million marks": b"\x80\x02" + b"(" * 20_000_000 + b".",
    "20 million copies of a number": b"\x80\x02](N" + b"2" * 20_000_000 + b"e.",
    "bytes of a terabyte": b"\x80\x04\x8e" + struct.pack("<Q", 2**40) + b".",
    "bytearray of 8 gigabytes": b"\x80\x05\x96" + struct.pack("<Q", 2**33) + b".",
    "frame of an exabyte": b"\x80\x04\x95" + struct.pack("<Q", 2**60) + b"N.",
    "text of 4 gigabytes": b"\x80\x02X\xff\xff\xff\xff.",
    "number of a million digits": b"\x80\x02L" + b"7" * 1_000_000 + b"L\n.",
    "text encoded 3,000 times": b"\x80\x02" + TEXT + b"q\x000](" + (
        b"c_codecs\nencode\nh\x00X\x06\x00\x00\x00latin1\x86R" * 3000
    ) + b"e.",
}  # fmt: skip


def calls(name: str, *arguments: bytes) -> bytes:
    """Opcodes of the call of a name, with the opcodes of its arguments."""
    module, _, function = name.rpartition(".")
    return b"c" + module.encode() + b"\n" + function.encode() + b"\n(" + b"".join(arguments) + b"tR"


HEX = b"X\x03\x00\x00\x00hex"
TORCH_PICKLES = {
    **{name: PICKLES[name] for name in ("memo index of 2 billion", "key of a nested tuple", "10 million dicts")},
    "bytearray of a gigabyte by a call": b"\x80\x02" + calls("builtins.bytearray", b"J\x00\x00\x00\x40") + b".",
    "encoded text, encoded 40 times": b"\x80\x02X\x04\x00\x00\x00abcd" + b"q\x00" + b"".join(
        calls("_codecs.encode", b"h\x00", HEX) + b"q\x00" for _ in range(40)
    ) + b".",
    "a set copied 200,000 times": b"\x80\x02](" + b"M\x01\x02" * 10_000 + b"eq\x000](" + (
        b"cbuiltins\nset\nh\x00\x85R" * 200_000
    ) + b"e.",
    "a dict copied 20,000 times": b"\x80\x02](" + b"K\x01K\x02\x86" * 10_000 + b"eq\x000](" + (
        b"ccollections\nOrderedDict\nh\x00\x85R" * 20_000
    ) + b"e.",
    "a list in itself": b"\x80\x02}X\x01\x00\x00\x00a]q\x00h\x00as.",
    "lists that double 60 times": b"\x80\x02}X\x01\x00\x00\x00aN" + b"q\x00](h\x00h\x00e" * 60 + b"s.",
}  # fmt: skip


def read_arrays(path: Path) -> None:
    """Read pickled arrays from a path."""
    load_arrays(path.read_bytes(), str(path))


def read_tensors(path: Path) -> None:
    """Read a model's state."""
    read_state(path)


def zipped(path: Path, pickled: bytes, compression: int = zipfile.ZIP_STORED) -> Path:
    """Write a file of torch.save with this pickle."""
    torch.save({"a": torch.ones(2)}, path)
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in parts.items():
            pickle_of_values = name.endswith("/data.pkl")
            archive.writestr(
                zipfile.ZipInfo(name), pickled if pickle_of_values else content,
                compression if pickle_of_values else zipfile.ZIP_STORED,
            )  # fmt: skip
    return path


def legacy(path: Path, pickled: bytes) -> Path:
    """Write a file in torch.save's older format with this pickle."""
    torch.save({"a": torch.ones(2)}, path, _use_new_zipfile_serialization=False)
    content = path.read_bytes()
    position = 0
    for _ in range(3):
        position = scan(content, position)
    end = scan(content, position)
    path.write_bytes(content[:position] + pickled + content[end:])
    return path


@pytest.mark.slow
def test_hostile_pickles_of_arrays_cost_little_and_end_in_a_message(tmp_path):
    valid = tmp_path / "valid.pkl"
    valid.write_bytes(pickle.dumps({"a": np.ones(2)}, 4))
    files = {name: tmp_path / f"hostile_{number}.pkl" for number, name in enumerate(PICKLES)}
    for name, path in files.items():
        path.write_bytes(PICKLES[name])
    assert complaints("tests.common.untrusted.test_hostile_pickles:read_arrays", valid, files) == []


@pytest.mark.parametrize("form", ["zip", pytest.param("legacy", marks=pytest.mark.slow)])
def test_hostile_files_of_tensors_cost_little_and_end_in_a_message(tmp_path, form):
    make = zipped if form == "zip" else legacy
    valid = tmp_path / "valid.pt"
    torch.save({"a": torch.ones(2)}, valid, _use_new_zipfile_serialization=form == "zip")
    files = {name: tmp_path / f"hostile_{number}.pt" for number, name in enumerate(TORCH_PICKLES)}
    for name, path in files.items():
        make(path, TORCH_PICKLES[name])
    files["expanded"] = tmp_path / "expanded.pt"
    expanded = {"a": torch.ones(1).expand(10**12)}
    torch.save(expanded, files["expanded"], _use_new_zipfile_serialization=form == "zip")
    if form == "zip":
        # None pushed and dropped again, 200 million times
        files["deflated"] = zipped(tmp_path / "deflated.pt", b"\x80\x02" + b"N0" * 200_000_000, zipfile.ZIP_DEFLATED)
        files["directory"] = tmp_path / "directory.pt"
        files["directory"].write_bytes(large_directory())
    assert complaints("tests.common.untrusted.test_hostile_pickles:read_tensors", valid, files) == []


def large_directory() -> bytes:
    """A zip whose directory has a million members."""
    directory = (b"PK\1\2" + bytes(42)) * 1_000_000
    end = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 0xFFFF, 0xFFFF, len(directory), 4, 0)
    return b"PK\3\4" + directory + end


def test_hostile_safetensors_cost_little_and_end_in_a_message(tmp_path):
    valid = tmp_path / "valid.safetensors"
    safetensors.torch.save_file({"a": torch.ones(2)}, valid)
    entry = '{"dtype":"F32","shape":[%s],"data_offsets":[0,0]}'
    headers = {
        "nested": '{"a":' + "[" * 200_000 + "]" * 200_000 + "}",
        "many tensors": "{" + ",".join(f'"{number}":{entry % 0}' for number in range(300_000)) + "}",
        "large number": '{"a":' + entry % ("1" + "0" * 400) + "}",
        "digits": '{"a":' + entry % ("7" * 1_000_000) + "}",
        "entries": '{"a":[' + "[]," * 4_000_000 + "[]]}",
    }
    files = {name: tmp_path / f"{name.replace(' ', '_')}.safetensors" for name in headers}
    for name, path in files.items():
        content = headers[name].encode()
        path.write_bytes(struct.pack("<Q", len(content)) + content)
    assert complaints("tests.common.untrusted.test_hostile_pickles:read_tensors", valid, files) == []


@pytest.mark.parametrize("name", sorted(name for name in PICKLES if "illion" not in name))
def test_the_scan_alone_refuses_expensive_pickles(name):
    with pytest.raises(Excessive):
        scan(PICKLES[name])


@pytest.mark.parametrize("protocol", range(6))
def test_the_scan_accepts_pickles_of_python(protocol):
    value = {
        "numbers": [0, 1, 255, 256, -1, 2**31, 2**70, 1.5, True, None],
        "texts": ["", "a", "\u20ac" * 300, b"", b"a" * 300],
        "nested": {"a": [(1, (2, 3)), {4, 5}, frozenset({6})] * 3},
        "many": list(range(3000)),
        "arrays": [np.arange(5), np.zeros((2, 0))],
    }
    pickled = pickle.dumps(value, protocol)
    assert scan(pickled + b"more") == len(pickled)
    assert scan(b"before" + pickled, len(b"before")) == len(b"before") + len(pickled)


def test_names_and_calls_are_reported():
    names = []
    called = []
    pickled = b"\x80\x02" + calls("os.system", b"X\x02\x00\x00\x00ls", b"K\x07") + b"."
    scan(pickled, named=names.append, called=lambda name, arguments: called.append((name, arguments)))
    assert names == ["os.system"]
    assert called == [("os.system", (2.0, 0))]


def test_an_ordered_dict_of_python_2_is_read(tmp_path):
    """Python 2 pickles it as a call of the class with a list of pairs."""
    torch.save({"a": torch.ones(2)}, tmp_path / "a.pt")
    with zipfile.ZipFile(tmp_path / "a.pt") as archive:
        pickled = next(archive.read(name) for name in archive.namelist() if name.endswith("data.pkl"))
    value = pickled[pickled.index(b"ctorch._utils") : -2]  # up to SETITEM and STOP
    pairs = b"\x80\x02ccollections\nOrderedDict\n](](X\x01\x00\x00\x00a" + value + b"ee\x85R."
    found = read_state(zipped(tmp_path / "b.pt", pairs))
    assert torch.equal(found["a"], torch.ones(2))


def test_a_long_key_is_not_in_the_message():
    key = b"N\x85" + b"q\x00h\x00\x86" * 8  # 511 tuples
    with pytest.raises(DataError, match="under a tuple") as caught:
        load_arrays(b"\x80\x02}" + key + b"Ns.", "a.pkl")
    assert len(str(caught.value)) < 200
