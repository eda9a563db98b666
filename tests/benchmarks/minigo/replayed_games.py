"""``mlperf-suite`` whose ranks that only play copy the games of another run: argument 1 is that run's output folder.

If it is ``fail``, these ranks fail instead; if it is ``damage``, they write a file that holds no games.
"""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path

from benchmarks import WORKLOADS
from benchmarks.minigo.records import CLOSED, SUFFIX, generation_folder
from benchmarks.minigo.run_folder import RunFolder
from benchmarks.minigo.workload import MiniGoWorkload
from common import cli
from common.errors import DataError

FAIL, DAMAGE = "fail", "damage"
PLAYED = ""
"""Argument 1."""


class Replay:
    """A player that finishes the games of a generation at once, when their model has been published."""

    def __init__(self, source: Path, run: RunFolder) -> None:
        self._source, self._run = source, run

    def play(self, seconds: float) -> bool:
        if str(self._source) == FAIL:
            raise DataError("the games are broken")
        newest = self._run.models.newest()
        assert newest is not None
        if str(self._source) == DAMAGE:
            (generation_folder(self._run.games, newest)).mkdir(parents=True, exist_ok=True)
            (generation_folder(self._run.games, newest) / f"damaged{SUFFIX}").write_bytes(bytes(100))
        played = generation_folder(RunFolder.below(self._source).games, newest)
        copy = generation_folder(self._run.games, newest)
        if played.is_dir() and not copy.exists():
            partial = self._run.path / "partial"
            shutil.copytree(played, partial, ignore=lambda *_: [CLOSED])
            copy.parent.mkdir(exist_ok=True)
            for left_out in set(partial.iterdir()) - {partial / name for name in (played / CLOSED).read_text().split()}:
                left_out.unlink()
            partial.rename(copy)
        time.sleep(0.05)
        return True

    def measures(self) -> dict[str, float | str]:
        """Nothing is measured."""
        return {}

    def close(self) -> None:
        """Nothing is open."""


class Replaying(MiniGoWorkload):
    """MiniGo with this player on ranks that only play."""

    def scratch(self, folder: Path, resumed_block: int | None) -> None:
        if self.layout.role != "play":
            super().scratch(folder, resumed_block)
            return
        run = RunFolder.below(folder)
        run.started("")
        self._player = Replay(Path(PLAYED), run)


if __name__ == "__main__":
    PLAYED = sys.argv.pop(1)
    WORKLOADS["minigo"] = "__main__:Replaying"
    cli.main()
