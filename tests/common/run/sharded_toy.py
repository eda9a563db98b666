"""``mlperf-suite`` whose toy also stages gzip files of one sample each; :mod:`tests.launch` starts its ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from benchmarks import WORKLOADS
from common import cli
from common.data.staging import SourceFile, StagingPlan
from common.untrusted.archives import gunzip
from tests import toy
from tests.toy.workload import Toy

FOLDERS = ("train", "eval")


class ShardedToy(Toy):
    """The toy, with files in the folders ``FOLDERS``, of which each node gets a shard."""

    def staging(self, root: Path) -> StagingPlan:
        """Return the toy's files, which every node gets, and the shards."""
        shards = {}
        for folder in FOLDERS:
            files = sorted((root / folder).iterdir())
            shards[folder] = [SourceFile(f"{folder}/{path.name}", path.stat().st_size) for path in files]
        return replace(super().staging(root), shards=shards, decode=gunzip)


if __name__ == "__main__":
    toy.register()
    WORKLOADS[toy.NAME] = "tests.common.run.sharded_toy:ShardedToy"
    cli.main()
