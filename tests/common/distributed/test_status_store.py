"""Test the status store in a shared folder, whose ranks may have equal process ids in containers on several hosts."""

from __future__ import annotations

import os
from pathlib import Path

from common.distributed.status_store import StatusFiles


def test_ranks_with_equal_process_ids_agree_on_the_first_claim(tmp_path: Path, monkeypatch) -> None:
    """The second rank claims between the first rank's write and its link."""
    first, second = StatusFiles(tmp_path), StatusFiles(tmp_path)
    link, answers = os.link, []

    def link_later(source: Path, target: Path) -> None:
        monkeypatch.setattr(os, "link", link)
        answers.append(second.claim("verdict", b"second"))
        link(source, target)

    monkeypatch.setattr(os, "link", link_later)
    answers.append(first.claim("verdict", b"first"))
    assert answers == [b"second", b"second"]
    assert [path.name for path in tmp_path.iterdir()] == ["verdict"]


def test_values_are_read_in_order_and_missing_ones_are_none(tmp_path: Path) -> None:
    store = StatusFiles(tmp_path / "store")
    store.post("a", b"1")
    store.post("a", b"2")
    assert store.read(["b", "a"]) == [None, b"2"]
