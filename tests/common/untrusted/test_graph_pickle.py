"""Pickled graphs of PyTorch Geometric 1 are read without executing code in them."""

from __future__ import annotations

import copyreg
import io
import os
import pickle
from collections import OrderedDict

import numpy as np
import pytest
import torch
import torch_geometric.data.data

from common.errors import DataError
from common.untrusted.graph_pickle import load_graph
from tests.common.untrusted.hostile import Call

TENSORS = {
    "float": torch.tensor([[1.5, -2], [3, 4]]),
    "double": torch.tensor([0.1], dtype=torch.float64),
    "long": torch.tensor([[1, 2, 3], [4, 5, 6]]),
    "transposed": torch.tensor([[1, 2], [3, 4], [5, 6]]).T,
    "part": torch.arange(10)[3:9:2],
    "bytes": torch.tensor([1, 255], dtype=torch.uint8),
    "flags": torch.tensor([True, False]),
    "scalar": torch.tensor(7),
    "empty": torch.zeros(0, 3),
}


class Graph:
    """A graph as version 1 pickles it: a new object, and the dict of its attributes."""

    __module__, __qualname__ = "torch_geometric.data.data", "Data"

    def __init__(self, state: object) -> None:
        self.state = state

    def __reduce_ex__(self, protocol: int) -> tuple:
        return copyreg.__newobj__, (Graph,), self.state


Graph.__name__ = "Data"


@pytest.fixture
def pickled(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch_geometric.data.data, "Data", Graph)
    return lambda state, protocol=4: pickle.dumps(Graph(state), protocol)


@pytest.mark.parametrize("protocol", [2, 4])
def test_tensors_and_numbers_are_read(protocol, pickled):
    others = {"natoms": 3, "y": 0.5, "energy": np.float64(-1.25), "x": None, "name": "a text"}
    found = load_graph(pickled(TENSORS | others, protocol), "a")
    assert set(found) == {*TENSORS, "natoms", "y", "energy"}
    assert (found["natoms"], found["y"], float(found["energy"])) == (3, 0.5, -1.25)
    for name, tensor in TENSORS.items():
        assert np.array_equal(found[name], tensor.numpy())
        assert found[name].dtype == tensor.numpy().dtype


def tensor(size: tuple, stride: tuple, offset: object = 0, storage: object = None) -> Call:
    """Return the call that makes a tensor of a storage of 6 elements."""
    storage = torch.arange(6)._typed_storage() if storage is None else storage
    return Call(torch._utils._rebuild_tensor_v2, storage, offset, size, stride, False, OrderedDict())


def storage_of(content: bytes) -> Call:
    return Call(torch.storage._load_from_bytes, content)


def saved(elements: int = 6) -> bytes:
    """Return a storage in the older format of ``torch.save``."""
    file = io.BytesIO()
    torch.save(torch.arange(elements)._typed_storage(), file, _use_new_zipfile_serialization=False)
    return file.getvalue()


@pytest.mark.parametrize(
    ("state", "asked"),
    [
        ({"pos": TENSORS["float"], "evil": Call(os.mkdir, "hurt")}, "posix.mkdir"),
        ({"evil": tensor((6,), (1,), storage=storage_of(pickle.dumps(Call(os.mkdir, "hurt")) * 5))}, "posix.mkdir"),
        ({"evil": Call(torch._utils._rebuild_tensor, torch.arange(6)._typed_storage(), 0, (6,), (1,))}, "torch._utils"),
        ({"evil": torch_geometric.data.Batch}, "torch_geometric.data.batch"),
    ],
    ids=["attribute", "storage", "function of torch", "class of PyTorch Geometric"],
)
def test_other_names_are_refused_and_not_called(state, asked, pickled, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=rf"^a: its pickle asks for {asked}.*; do not use this file"):
        load_graph(pickled(state), "a")
    assert not (tmp_path / "hurt").exists()


@pytest.mark.parametrize(
    "evil",
    [
        tensor((7,), (1,)),
        tensor((2,), (6,)),
        tensor((2,), (1,), 5),
        tensor((2,), (-1,), 3),
        tensor((6, 2**20), (1, 0)),
        tensor((2**24, 2**24, 2**24), (0, 0, 0)),
        tensor((2, 3), (3,)),
        tensor((6,), (1,), 0.0),
        tensor((6,), (1,), storage=[1, 2, 3]),
        tensor((6,), (1,), storage=storage_of(saved()[:-1])),
        tensor((6,), (1,), storage=storage_of(saved() + b"0")),
        tensor((6,), (1,), storage=storage_of(saved()[:-56] + (7).to_bytes(8, "little") + saved()[-48:])),
        tensor((6,), (1,), storage=storage_of(b"")),
        tensor((6,), (1,), storage=storage_of("a text")),
    ],
    ids=[
        "more than the storage", "stride", "offset", "negative stride", "expanded", "overflow", "axes", "fraction",
        "list", "short storage", "long storage", "other number of elements", "empty storage", "text",
    ],
)  # fmt: skip
def test_tensors_outside_of_their_storage_are_refused(evil, pickled):
    with pytest.raises(DataError, match=r"^a is damaged, or no pickle: "):
        load_graph(pickled({"pos": TENSORS["float"], "evil": evil}), "a")


def test_a_cut_pickle_is_damaged_wherever_it_ends(pickled):
    content = pickled(TENSORS)
    for end in range(0, len(content), 7):
        with pytest.raises(DataError, match=r"^a is damaged, or no pickle: "):
            load_graph(content[:end], "a")


@pytest.mark.parametrize("content", [{"pos": np.zeros(3)}, [1], 7], ids=["dict", "list", "number"])
def test_other_objects_are_no_graphs(content):
    with pytest.raises(DataError, match="where a graph of PyTorch Geometric 1 is expected"):
        load_graph(pickle.dumps(content), "a")


def test_a_graph_without_a_dict_is_refused(pickled):
    with pytest.raises(DataError, match="where a graph of PyTorch Geometric 1 is expected"):
        load_graph(pickled((1, 2)), "a")
