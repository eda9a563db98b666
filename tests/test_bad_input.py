"""Test that wrong arguments, configurations and data end in one clear message and the right exit code."""

from __future__ import annotations

import functools
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.command_line import assert_closed_as_aborted, the_message, training
from tests.conftest import SECONDS, Finished, prepared, suite

CONFIGURATION, DATA = 2, 3  # exit codes


@dataclass(frozen=True)
class Case:
    """A command line and the texts that its message must contain."""

    name: str
    arguments: tuple[str, ...]
    says: tuple[str, ...]
    code: int = CONFIGURATION


def _train(name: str, *overrides: str, says: tuple[str, ...]) -> Case:
    base = ("train", "benchmark=resnet", "scale=test", "device=cpu", "output_dir=OUTPUT", "data_dir=OUTPUT/none")
    return Case(name, (*base, *overrides), says)


UNKNOWN_KEY = "unknown configuration key"
CASES = [
    _train("unknown key", "foo=1", says=("foo", UNKNOWN_KEY)),
    _train("unknown key added", "+foo=1", says=("foo", UNKNOWN_KEY)),
    _train("unknown key in a section", "hparams.foo=1", says=("hparams.foo", UNKNOWN_KEY)),
    _train("unknown key added to a section", "+hparams.foo=1", says=("hparams.foo", "unknown key")),
    _train("former key", "stand_in=[--train,4]", says=("stand_in", "it is synthetic now")),
    Case(
        "former key of maskrcnn", ("train", "benchmark=maskrcnn", "scale=test", "reader.polygon_room={objects: 9}"),
        ("reader.polygon_room", "it is reader.polygon_capacity now"),
    ),
    _train("former data set", "benchmark.data_set=stand-in", says=("benchmark.data_set=stand-in", "is synthetic now")),
    _train("override without a value", "foo", says=("'foo'", "key=value")),
    _train("override that does not parse", "foo=[1", says=("'foo=[1'", "key=value")),
    _train("interpolation of nothing", "data_dir=${nothing}", says=("nothing", "not found")),
    _train("graphs of no kind", "cuda_graphs=parts", says=("cuda_graphs=parts", "true, false or chunks")),
    _train("graphs of chunks that there are not", "cuda_graphs=chunks", says=("cuda_graphs=chunks", "resnet", "true")),
    _train("text for a number", "micro_batch=abc", says=("micro_batch=abc", "int")),
    _train(
        "batch that micro-batches do not divide", "hparams.global_batch_size=20",
        says=("hparams.global_batch_size=20", "micro_batch=8"),
    ),
    _train(
        "batch that ranks do not divide", "scale.gpus_per_node=3",
        says=("hparams.global_batch_size=16", "3 ranks do not divide it"),
    ),
    _train(
        "batch that is larger than an epoch", "hparams.global_batch_size=104",
        says=("hparams.global_batch_size=104", "96 training samples"),
    ),
    _train("axis of no size", "layout.pp=0", says=("layout.pp=0",)),
    _train("unknown axis", "+layout.xp=2", says=("layout.xp=2", "pp, cp and tp")),
    _train("axis that does not divide the ranks", "layout.tp=2", says=("tp=2", "1 ranks")),
    _train("warm-up that outlasts the training", "hparams.warmup_epochs=5", says=("hparams.warmup_epochs=5",)),
    _train("bucket of no size", "optimizer.bucket_mb=0", says=("optimizer.bucket_mb=0",)),
    _train("option that the schedule lacks", "+benchmark.schedule.foo=1", says=("benchmark.schedule", "'foo'")),
    _train("power for a GPU that is not used", "system.vboost=1", says=("system.vboost=1", "no GPU")),
    _train("negative seed", "seed=-1", says=("seed=-1", "0 or more")),
    _train("seed of more than 64 bits", f"seed={2**64}", says=(f"seed={2**64}", "below 2**64")),
    _train("time limit below zero", "timeout_seconds=-1", says=("timeout_seconds=-1", "positive")),
    _train("time limit that never ends", "timeout_seconds=inf", says=("timeout_seconds=inf", "at most")),
    _train("empty path", "assets_dir=", says=("assets_dir=", "an empty path")),
    _train("path that is null", "data_dir=null", says=("data_dir=null", "expected Path, got null")),
    _train("group that is null", "scale=null", says=("scale=null", "name of a choice")),
    _train("no ruleset", "ruleset=9.9.9", says=("ruleset 9.9.9 is not known", "resnet", "4.0.0")),
    _train("ruleset that is a number", "ruleset=9.9", says=("ruleset 9.9 is not known", "resnet", "4.0.0")),
    # ResNet-50's last round is v4.0.
    _train("ruleset without the benchmark", "ruleset=4.1.0", says=("ruleset 4.1.0", "resnet", "last round v4.0")),
    Case("unknown benchmark", ("train", "benchmark=nosuch"), ("benchmark=nosuch", "resnet")),
    Case("benchmark in other case", ("train", "benchmark=ResNet"), ("benchmark=ResNet", "did you mean resnet?")),
    Case("benchmark of generate in other case", ("generate", "benchmark=BERT"), ("did you mean bert?",)),
    Case("unknown scale", ("train", "benchmark=resnet", "scale=nosuch"), ("scale=nosuch", "8xH200", "demo")),
    Case(
        "two nodes started alone",
        ("train", "benchmark=resnet", "scale=test", "scale.nodes=2", "output_dir=OUTPUT"),
        ("2 nodes", "torchrun", "srun"),
    ),
    Case("unknown command", ("trian",), ("'trian'", "train")),
    Case("arguments for list", ("list", "all"), ("list",)),
    Case("bench of an unknown benchmark", ("bench", "benchmark=nosuch"), ("benchmark=nosuch", "resnet")),
    Case("bench with an unknown key", ("bench", "benchmark=resnet", "bench.foo=1"), ("bench.foo", UNKNOWN_KEY)),
    Case(
        "bench of no steps", ("bench", "benchmark=resnet", "scale=test", "device=cpu", "bench.steps=0"),
        ("bench.steps=0",),
    ),
    Case("prepare for no benchmark", ("prepare",), ("prepare", "benchmark=NAME")),
    Case("prepare with an override", ("prepare", "benchmark=bert", "raw_dir=x"), ("prepare raw_dir=x", "--raw-dir, ")),
    Case("prepare with a scale", ("prepare", "benchmark=bert", "scale=demo"), ("prepare scale=demo", "--raw-dir, ")),
    Case("verify for an unknown benchmark", ("verify", "benchmark=nosuch"), ("benchmark=nosuch", "resnet")),
    Case("generate for real data", ("generate", "benchmark=resnet", "scale=8xH200"), ("8xH200", "synthetic data")),
    Case("generate of no pictures", ("generate", "benchmark=resnet", "--train", "0", "--raw-dir", "OUTPUT"), ("0",)),
    Case(
        "prepare from an empty folder",
        ("prepare", "benchmark=resnet", "--raw-dir", "EMPTY", "--data-dir", "OUTPUT"), ("no train pictures",), DATA,
    ),
    Case("verify of an empty folder", ("verify", "benchmark=resnet", "--data-dir", "EMPTY"), ("manifest.json",), DATA),
]  # fmt: skip


@pytest.fixture(scope="module")
def outcome_of(request: pytest.FixtureRequest) -> Iterator[Callable[[Case], tuple[Finished, Path]]]:
    """Yield a function that returns the result of a case's command and its output folder; two run at a time."""
    wanted = [item.callspec.params["case"] for item in request.session.items if "case" in _parameters(item)]

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(min(2, os.cpu_count() or 1)) as pool:
        root = Path(folder)

        def command(case: Case) -> tuple[Finished, Path]:
            output = root / case.name.replace(" ", "-")
            empty = root / f"{output.name}.empty"
            empty.mkdir()
            names = {"OUTPUT": str(output), "EMPTY": str(empty)}
            arguments = [functools.reduce(lambda text, n: text.replace(n, names[n]), names, a) for a in case.arguments]
            return suite(*arguments, timeout=SECONDS), output

        pending: dict[str, Future[tuple[Finished, Path]]] = {c.name: pool.submit(command, c) for c in wanted}
        yield lambda case: pending[case.name].result()
        pool.shutdown(cancel_futures=True)


def _parameters(item: pytest.Item) -> dict[str, object]:
    return item.callspec.params if hasattr(item, "callspec") and item.path == Path(__file__) else {}


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_wrong_arguments_are_one_message_and_leave_nothing(case, outcome_of):
    done, output = outcome_of(case)
    message = the_message(done)
    assert done.code == case.code, message
    for text in case.says:
        assert text in message
    assert not output.exists()


@pytest.mark.parametrize("arguments", [["check"], ["train", "--nosuch"]])
def test_wrong_flags_are_a_usage_error(arguments):
    done = suite(*arguments, timeout=SECONDS)
    assert done.code == CONFIGURATION
    assert done.errors.startswith("usage: ")
    assert len([line for line in done.errors.splitlines() if "error: " in line]) == 1
    assert "Traceback" not in done.errors


def test_a_value_that_the_closed_division_forbids_names_key_value_and_rule(tmp_path):
    # training_rules, table of hyperparameters: lars_opt_end_learning_rate is 0.0001.
    done = suite(*training(tmp_path / "none", tmp_path / "out", "hparams.end_learning_rate=0.001", benchmark="resnet"))
    assert done.code == CONFIGURATION
    assert "Traceback" not in done.errors
    naming = [line for line in done.errors.splitlines() if "lars_opt_end_learning_rate" in line]
    assert len(naming) == 1
    assert "0.001 " in naming[0]
    assert "== 0.0001" in naming[0]
    assert len(done.errors.splitlines()) <= 3
    assert not (tmp_path / "out").exists()


def test_the_open_division_accepts_what_the_closed_one_forbids(data_of, tmp_path):
    overrides = ["hparams.end_learning_rate=0.001", "submission.division=open"]
    done = suite(*training(data_of("resnet"), tmp_path / "out", *overrides, benchmark="resnet"))
    assert done.code in (0, 10), done.errors
    assert '"lars_opt_end_learning_rate", "value": 0.001' in (tmp_path / "out" / "mlperf.log").read_text()


def test_an_interactive_step_of_slurm_learns_how_to_start_the_ranks(tmp_path):
    step = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_NTASKS": "1"}
    overrides = training(tmp_path / "none", tmp_path / "out", "scale.gpus_per_node=2", benchmark="resnet")
    done = suite(*overrides, **step)
    message = the_message(done)
    assert done.code == CONFIGURATION
    assert "1 were started by slurm; give srun --nodes=1 --ntasks-per-node=2, or env -u SLURM_STEP_ID" in message


def test_output_that_is_no_folder(data_of):
    done = suite(*training(data_of("resnet"), Path("/dev/null"), benchmark="resnet"))
    assert done.code == CONFIGURATION
    assert "output_dir=/dev/null" in the_message(done)


def test_without_data_no_run_is_opened(tmp_path):
    nowhere = Path("no-such-folder")  # which the message has several times, and is to stay short
    done = suite(*training(nowhere, tmp_path / "out", "scale.gpus_per_node=2", benchmark="resnet"))
    assert done.code == DATA
    assert f"data folder {nowhere} does not exist" in the_message(done)
    assert not (tmp_path / "out").exists()


def test_data_of_another_recipe(tmp_path):
    other = prepared("resnet", tmp_path / "other", ["--train", "48"])
    done = suite(*training(other, tmp_path / "out", benchmark="resnet"), timeout=SECONDS)
    message = the_message(done)
    assert done.code == DATA
    assert "48 training and 40 evaluation samples" in message
    assert "96 and 40" in message
    assert not (tmp_path / "out" / "mlperf.log").exists()


def test_data_that_vanish_after_their_manifest_are_named(data_of, tmp_path):
    data = shutil.copytree(data_of("toy"), tmp_path / "data")
    (data / "eval_volumes.npy").unlink()
    output = tmp_path / "out"
    done = suite(*training(data, output))
    assert done.code == DATA
    assert f"{data}/eval_volumes.npy: No such file or directory" in the_message(done)
    assert_closed_as_aborted(output / "mlperf.log")


@pytest.mark.parametrize("split", ["train", "val"])
def test_a_record_that_is_no_picture_is_named(split, data_of, tmp_path):
    data = shutil.copytree(data_of("resnet"), tmp_path / "data")
    record, offset = spoil_a_picture(data, split)
    message = failed_on(data, tmp_path)
    assert f"{split}.rec: record {record} at byte {offset}" in message
    assert "cannot be decoded" in message


def test_of_two_ranks_the_one_that_meets_bad_data_says_so(data_of, tmp_path):
    data = shutil.copytree(data_of("resnet"), tmp_path / "data")
    record, _ = spoil_a_picture(data, "train")
    assert f"record {record}" in failed_on(data, tmp_path, "scale.gpus_per_node=2")


def test_truncated_records(data_of, tmp_path):
    data = shutil.copytree(data_of("resnet"), tmp_path / "data")
    size = (data / "train.rec").stat().st_size
    os.truncate(data / "train.rec", size - 100)
    message = failed_on(data, tmp_path)
    assert f"train.rec has {size - 100} bytes" in message
    assert str(size) in message


def test_truncated_records_that_the_manifest_does_not_show(data_of, tmp_path):
    data = shutil.copytree(data_of("resnet"), tmp_path / "data")
    size = (data / "train.rec").stat().st_size
    os.truncate(data / "train.rec", size - 100)
    manifest = json.loads((data / "manifest.json").read_text())
    manifest["files"]["train.rec"]["bytes"] = size - 100
    (data / "manifest.json").write_text(json.dumps(manifest))
    last = (data / "train.idx").read_text().split()[-2]
    message = failed_on(data, tmp_path)
    assert f"train.rec: record {last} " in message
    assert "truncated" in message


def failed_on(data: Path, tmp_path: Path, *overrides: str) -> str:
    """Return the message of a run on bad data; check that its log is aborted and that no partial file is left."""
    output = tmp_path / "out"
    done = suite(*training(data, output, *overrides, benchmark="resnet"), timeout=SECONDS)
    message = the_message(done)
    assert done.code == DATA, message
    assert_closed_as_aborted(output / "mlperf.log")
    assert not [path for path in output.rglob("*") if path.name.endswith(".partial")]
    return message


def spoil_a_picture(data: Path, split: str) -> tuple[int, int]:
    """Overwrite one JPEG within its record, and return the record's id and offset."""
    index = [tuple(map(int, line.split())) for line in (data / f"{split}.idx").read_text().splitlines()]
    (record, start), (_, end) = index[len(index) // 2], index[len(index) // 2 + 1]
    with (data / f"{split}.rec").open("r+b") as file:
        file.seek(start + 8 + 24)  # behind the record's frame and the picture's header
        file.write(b"\x55" * (end - start - 8 - 24 - 4))
    return record, start
