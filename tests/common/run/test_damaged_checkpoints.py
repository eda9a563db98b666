"""A checkpoint whose content is damaged is refused with CheckpointError, never with another error."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from common.distributed.layout import Layout
from common.errors import CheckpointError
from common.optim import state
from common.recommendation import row_files
from common.recommendation.tables import Table, Tables
from common.run import checkpoint
from common.run.checkpoint import Progress

HUGE = 10**400
DEEP: list[Any] = []
for _ in range(200):
    DEEP = [DEEP]


class Counter:
    """An updater with a counter and a named tensor, like an optimizer."""

    def materialize(self) -> None:
        """The model is always up to date."""

    def state_dict(self) -> dict[str, Any]:
        return {"step": torch.tensor(3), "momentum": {"weight": torch.zeros(2, 3)}}

    def load_state_dict(self, loaded: dict[str, Any]) -> None:
        state.check((), {}, {})


DAMAGE: dict[str, Any] = {
    "format": ["a", None, HUGE, torch.ones(3), {}],
    "layout": [None, [], {}, {"dp": 1}, {"pp": 1, "dp": 1, "cp": 1, "tp": "1"}, {"pp": 1, "dp": HUGE, "cp": 1, "tp": 1},
               {"pp": 1, "dp": 0, "cp": 1, "tp": 1}, {"pp": 1, "dp": -1, "cp": 1, "tp": 1}, {1: 1}],
    "seed": [None, "1", 1.5, -1, HUGE, torch.tensor(1), True],
    "settings": [None, [], {3: 4}, {"a": torch.ones(2)}, {"a": DEEP}],
    "configuration": [None, [], {3: 4}, {"a": torch.ones(2)}],
    "progress": [None, [], {}, {"step": 1}, {"step": "1", "counted": 1, "history": ()},
                 {"step": HUGE, "counted": 1, "history": ()}, {"step": -1, "counted": 1, "history": ()},
                 {"step": 1, "counted": 1, "history": 3}, {"step": 1, "counted": 1, "history": [(1,)]},
                 {"step": 1, "counted": 1, "history": [(1, [])]}, {"step": 1, "counted": 1, "history": [(1, {2: 3.0})]},
                 {"step": 1, "counted": 1, "history": (), "more": 1}],
    "random": [None, {}, {"cpu": None}, {"cpu": torch.ones(3)}, {"cpu": torch.ones(3, dtype=torch.uint8)}, []],
    "base": [3, [], torch.ones(1)],
    "model": [None, [], {"weight": None}, {3: torch.ones(2, 3)}, {"weight": torch.eye(3).to_sparse()},
              {"weight": torch.ones(2, 3, device="meta")}],
    "updaters": [None, {}, [None], [[]], [{3: torch.ones(1)}], [{"momentum": {3: torch.ones(1)}}], [DEEP], [],
                 [{}, {}]],
    "buffers": [None, [], {"a": 3}],
    "late": [None, {}, ["1"], [-1], [True]],
}  # fmt: skip


def build() -> nn.Module:
    return nn.Linear(3, 2)


def save(folder: Path) -> Path:
    return checkpoint.save(folder, Progress(step=1, counted=8), 1, {"micro_batch": 4}, build(), (Counter(),), Layout())


def resume(saved: Path) -> None:
    layout = Layout()
    content = checkpoint.read(saved, {"micro_batch": 4}, layout)
    checkpoint.restore(content, build(), (Counter(),), layout)


def test_the_undamaged_checkpoint_is_read(tmp_path):
    resume(save(tmp_path))


@pytest.mark.parametrize("name", sorted(DAMAGE))
@pytest.mark.filterwarnings("ignore:Validating sparse tensor invariants")
def test_a_wrong_entry_is_one_error(tmp_path, name):
    saved = save(tmp_path)
    content = torch.load(saved / "rank_0.pt", weights_only=True)
    for value in DAMAGE[name]:
        torch.save({**content, name: value}, saved / "rank_0.pt")
        with pytest.raises(CheckpointError):
            resume(saved)


@pytest.mark.parametrize("name", sorted(DAMAGE.keys() - {"buffers", "late"}))
def test_a_missing_entry_is_one_error(tmp_path, name):
    saved = save(tmp_path)
    content = torch.load(saved / "rank_0.pt", weights_only=True)
    del content[name]
    torch.save(content, saved / "rank_0.pt")
    with pytest.raises(CheckpointError, match=r"rank_0\.pt"):
        resume(saved)


@pytest.mark.parametrize(
    "content",
    [[], 3, "text", {}, {3: 4}, torch.ones(2), None],
    ids=["list", "number", "text", "empty", "key", "tensor", "none"],
)
def test_another_content_is_one_error(tmp_path, content):
    saved = save(tmp_path)
    torch.save(content, saved / "rank_0.pt")
    with pytest.raises(CheckpointError, match=r"rank_0\.pt"):
        resume(saved)


def test_a_pipe_is_no_checkpoint(tmp_path):
    saved = save(tmp_path)
    (saved / "rank_0.pt").unlink()
    os.mkfifo(saved / "rank_0.pt")
    with pytest.raises(CheckpointError):
        resume(saved)


HEAD = '{"dtype": "torch.float32", "state": "", "width": 4, "size": 0, "parts": [%s]}'
PART = '{"table": "a", "shard": 0, "shards": 1, "rows": 2, "rows_at": 0, "state_at": 0}'


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", "null", "[" * 200_000, HEAD % "3", HEAD % "{}", HEAD % PART.replace("2", "1e400"),
     HEAD % PART.replace("2", "1" + "0" * 400), HEAD % PART.replace('"shards": 1', '"shards": 0'),
     HEAD % PART.replace('"rows_at": 0', '"rows_at": -8'), HEAD % PART.replace('"a"', "[]")],
    ids=["empty", "list", "object", "null", "nested", "number", "no part", "infinite", "huge", "no shards", "negative",
         "no name"],
)  # fmt: skip
def test_a_damaged_head_of_rows_is_one_error(tmp_path, text):
    (tmp_path / "rows_0.json").write_text(text)
    (tmp_path / "rows_0.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match="rows_0"):
        row_files.read(tmp_path, Tables((Table("a", 2, 1),), 4), ())
