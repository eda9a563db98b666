"""Ranks whose machines do not share the run's folder: here, ranks with working folders of their own."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from common.errors import UNFIT, CheckpointError, ConfigError
from tests import toy
from tests.command_line import ENDLESS, await_that, training
from tests.conftest import SECONDS, suite
from tests.forked import Forked

OUTPUT = Path("out")


@contextlib.contextmanager
def machines(folder: Path, *arguments: str, shared: bool = False) -> Iterator[list[Forked]]:
    """Two ranks of the suite, each as a machine called n1 or n2 with a working folder of that name."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=SECONDS))
    processes = []
    for rank in range(2):
        cwd = folder / ("n1" if shared else f"n{rank + 1}")
        cwd.mkdir(exist_ok=True)
        ranks = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "GROUP_RANK": rank}
        environment = {
            **os.environ,
            **{name: str(value) for name, value in ranks.items()},
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "SLURMD_NODENAME": f"n{rank + 1}",
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
        }
        processes.append(Forked([sys.executable, "-m", "tests.toy", *arguments], cwd, environment))
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def ended(processes: list[Forked]) -> tuple[list[int | None], str]:
    """Exit codes of the ranks, and their standard error."""
    errors = "".join([process.communicate(SECONDS)[1] for process in processes])
    return [process.returncode for process in processes], errors


TWO_NODES = ("scale.nodes=2", "scale.gpus_per_node=1")
OF_TWO = ("scale.nodes=1", "scale.gpus_per_node=2", "evaluation.ranks=1")


@pytest.mark.parametrize(
    ("benchmark", "overrides", "setting"),
    [
        (toy.NAME, (*TWO_NODES, "checkpoint_every=2"), "checkpoint_every=2"),
        (toy.NAME, (*OF_TWO, "checkpoint_every=3"), "checkpoint_every=3"),
        (toy.PICTURES, TWO_NODES, "evaluation.scoring=offline"),
    ],
    ids=["checkpoints", "checkpoints-beside-an-evaluation-rank", "offline"],
)
def test_a_setting_that_needs_a_shared_folder_is_refused_with_the_host(
    benchmark, overrides, setting, data_of, tmp_path
):
    data = data_of(toy.NAME)
    with machines(tmp_path, *training(data, OUTPUT, *overrides, benchmark=benchmark)) as ranks:
        codes, errors = ended(ranks)
    assert codes == [ConfigError.exit_code] * 2, errors
    assert errors.count("ConfigError") == 1
    assert "a file that rank 0 wrote there on n1 is not visible on n2 (rank 1)" in errors
    assert f"{setting} needs a folder that all ranks share" in errors
    assert "Traceback" not in errors
    assert [list((tmp_path / name / OUTPUT).iterdir()) for name in ("n1", "n2")] == [[], []]


@pytest.mark.parametrize("shared", [False, True], ids=["apart", "shared"])
def test_a_signal_writes_a_checkpoint_only_in_a_shared_folder(shared, data_of, tmp_path):
    arguments = training(data_of(toy.NAME), OUTPUT, *ENDLESS, *TWO_NODES)
    with machines(tmp_path, *arguments, shared=shared) as ranks:
        log = tmp_path / "n1" / OUTPUT / "mlperf.log"
        await_that(lambda: log.is_file() and "block_start" in log.read_text(), ranks[0])
        for process in ranks:
            process.send_signal(signal.SIGTERM)
        codes, errors = ended(ranks)
    assert codes == [128 + signal.SIGTERM] * 2, errors
    assert "Traceback" not in errors
    files = sorted(file.name for file in tmp_path.rglob("checkpoints/step_*/*.pt"))
    assert files == (["rank_0.pt", "rank_1.pt"] if shared else [])
    assert not list(tmp_path.rglob("*.partial"))
    for sentence in ("no checkpoint is written when the run is interrupted", "no checkpoint of step "):
        assert errors.count(sentence) == (0 if shared else 1), errors
    assert ("not visible on n2 (rank 1)" in errors) is not shared


def test_earlier_checkpoints_stay_when_a_folder_stops_being_shared(data_of, tmp_path):
    shared, own = tmp_path / "n1" / OUTPUT, tmp_path / "own"
    for folder in (shared, own, tmp_path / "n2"):
        folder.mkdir(parents=True)
    (tmp_path / "n2" / OUTPUT).symlink_to(shared)
    (tmp_path / "n3").symlink_to(own)
    overrides = ("checkpoint_every=2", "keep_checkpoints=1000000")
    with machines(tmp_path, *training(data_of(toy.NAME), OUTPUT, *ENDLESS, *TWO_NODES, *overrides)) as ranks:
        await_that(lambda: bool(list(shared.glob("checkpoints/step_*"))), ranks[0])
        (tmp_path / "n3").replace(tmp_path / "n2" / OUTPUT)  # as if the file system were gone on this machine
        codes, errors = ended(ranks)
    assert codes == [CheckpointError.exit_code] * 2, errors
    assert errors.count("CheckpointError") == 1
    assert "1 of the 2 ranks' files are there, that of rank 1 is not: the ranks do not share this folder" in errors
    assert not list(tmp_path.rglob("*.partial"))
    assert not list(own.rglob("*.pt"))
    kept = list(shared.glob("checkpoints/step_*"))
    assert kept
    assert all(sorted(file.name for file in saved.iterdir()) == ["rank_0.pt", "rank_1.pt"] for saved in kept)


def test_scoring_refuses_a_folder_that_is_not_shared(data_of, tmp_path):
    output = tmp_path / "n1" / OUTPUT
    by_command = ("evaluation.by_command=true", "benchmark.schedule.last_samples=64")
    done = suite(*training(data_of(toy.NAME), output, *by_command, benchmark=toy.PICTURES))
    assert done.code == 0, done.errors
    shutil.copytree(output, tmp_path / "n2" / OUTPUT)
    with machines(tmp_path, "score", str(OUTPUT), *TWO_NODES) as ranks:
        codes, errors = ended(ranks)
    assert codes == [ConfigError.exit_code] * 2, errors
    assert "is not visible on n2 (rank 1). evaluation.scoring=offline needs a folder that all ranks share" in errors
    assert "Traceback" not in errors


def _own_data(folder: Path) -> None:
    """Different data sets on two machines."""
    for name in ("n1", "n2"):
        data = folder / name / "data"
        data.mkdir(parents=True)
        (data / "manifest.json").write_text(name)


def _no_data(folder: Path) -> None:
    """A data set on the first machine only."""
    _own_data(folder)
    (folder / "n2" / "data" / "manifest.json").unlink()


@pytest.mark.parametrize(
    ("arguments", "prepare", "finding"),
    [
        (
            ("--output-dir", "out"),
            lambda folder: None,
            "n2: --output-dir is shared with rank 0: a file that rank 0 wrote",
        ),
        (("--output-dir", "/proc/1/none"), lambda folder: None, "rank 0, on n1, cannot write into /proc/1/none: "),
        (("--data-dir", "data"), _own_data, "content of --data-dir differs: manifest "),
        (("--data-dir", "data"), _no_data, "n2: content of --data-dir: data is empty"),
    ],
    ids=["output", "unwritable-output", "other-data", "no-data"],
)
def test_doctor_names_the_node_that_does_not_share_a_folder(arguments, prepare, finding, tmp_path):
    prepare(tmp_path)
    with machines(tmp_path, "doctor", "--quick", "--only", "storage", *arguments) as ranks:
        outputs = [process.communicate(SECONDS) for process in ranks]
        assert [process.returncode for process in ranks] == [UNFIT] * 2, outputs
    assert finding in outputs[0][0]
    assert not list(tmp_path.rglob(".seen_by_all_ranks_*"))


def test_doctor_finds_shared_folders_fit(tmp_path):
    _own_data(tmp_path)
    arguments = ("doctor", "--quick", "--only", "storage", "--output-dir", "out/put", "--data-dir", "data")
    with machines(tmp_path, *arguments, shared=True) as ranks:
        outputs = [process.communicate(SECONDS) for process in ranks]
        assert [process.returncode for process in ranks] == [0, 0], outputs
    assert sorted(path.name for path in (tmp_path / "n1").iterdir()) == ["data"]
