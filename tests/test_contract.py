"""Test the contract of all workloads and of the toy workload, with ``scale=test``."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pickle
import random
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch

from benchmarks import WORKLOADS
from common import cli
from common.config.composition import compose
from common.config.schema import RunConfig, SessionConfig
from common.data.batches import Block
from common.data.preparation import assets_of
from common.distributed.layout import Layout
from common.distributed.startup import find_rank_info
from common.mlperf.events import RunEvents
from common.mlperf.rules import newest_ruleset
from common.mlperf.verdict import judge
from common.run.trainer import Trainer
from common.step.graphs import StepRunner
from common.vision.dali import DALI
from tests import toy
from tests.command_line import await_that, endless, finish, is_training, started
from tests.conftest import SECONDS, checkpoint, flatten, one_of_each_family, suite
from tests.forked import PICTURE

ALL = [*sorted(WORKLOADS), toy.NAME]
ONE_OF_EACH_FAMILY = one_of_each_family(ALL)
SHORT = {
    "bert": ["hparams.training_steps=4"],
    "cosmoflow": ["benchmark.schedule.last_epoch=1"],
    "deepcam": ["benchmark.schedule.last_epoch=1"],
    "dlrm": ["benchmark.schedule.last_samples=16"],
    "dlrm_dcnv2": ["benchmark.schedule.last_samples=16"],
    "flux1": ["benchmark.schedule.last_samples=16"],
    "gpt3": ["benchmark.schedule.last_samples=16"],
    "llama2_70b_lora": ["hparams.training_steps=4"],
    "llama31_8b": ["benchmark.schedule.last_samples=16"],
    "maskrcnn": ["benchmark.schedule.last_epoch=1"],
    "minigo": ["benchmark.schedule.last_generation=1"],
    "oc20": ["benchmark.schedule.last_epoch=1"],
    "openfold": ["benchmark.schedule.last_samples=160"],
    toy.NAME: ["benchmark.schedule.last_epoch=1"],
    "resnet": ["benchmark.schedule.last_epoch=1"],
    "retinanet": ["benchmark.schedule.last_epoch=1"],
    "rgat": ["benchmark.schedule.last_samples=16"],
    "rnnt": ["benchmark.schedule.last_epoch=1"],
    "ssd300": ["benchmark.schedule.last_epoch=5"],
    "stable_diffusion": ["benchmark.schedule.last_samples=8"],
    "unet3d": ["benchmark.schedule.first_epoch=1", "benchmark.schedule.last_epoch=1", "benchmark.facts.overlap=0.0"],
}
"""Overrides with which a run ends after its first block."""
ALIVE = {
    "flux1": ["model.zero_std=0.02"],
    "openfold": ["model.final_std=0.02"],
    "stable_diffusion": ["model.zero_std=0.02"],
}
"""Overrides with which no gradient of the first step is zero."""
TIMED_DATA = ("minigo",)
"""Workloads whose data depend on time, so that a run is not repeated bit for bit: a resumed run plays other games."""
MOMENTS = ("momentum", "exp_avg", "sum")
"""Prefixes of the names of averaged gradients, and of Adagrad's sums of squares."""


@pytest.fixture(autouse=True, scope="module")
def known_toy() -> Iterator[None]:
    """Let this process compose the toy workload's configuration."""
    with toy.known(pictures=False):
        yield


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Use one thread: the recipes are so small that several threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def composed(workload: str, *overrides: str) -> tuple[RunConfig, SessionConfig]:
    """Return the validated configuration of ``scale=test``."""
    return cli.load(compose([f"benchmark={workload}", "scale=test", "device=cpu", *overrides]))


def run(workload: str, data: Path, output: Path, *overrides: str) -> list[str]:
    """Return the arguments of a test run."""
    return [
        "train", f"benchmark={workload}", "scale=test", "device=cpu", "seed=1234",
        f"data_dir={data}", f"output_dir={output}", *overrides,
    ]  # fmt: skip


def digest(tensors: dict[str, torch.Tensor]) -> str:
    """Return one hash over names and bytes."""
    made = hashlib.sha256()
    for name in sorted(tensors):
        made.update(name.encode())
        made.update(tensors[name].detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return made.hexdigest()


def readers() -> list[object]:
    """Return the overrides that choose each reader that can run here, for each workload's recipe."""
    cases = []
    for workload in ALL:
        cases.append(pytest.param(workload, (), id=workload))
        if workload in WORKLOADS and "reader" in compose([f"benchmark={workload}", "scale=test"]).get("reader", {}):
            absent = pytest.mark.skipif(DALI.unavailable() is not None, reason="needs DALI")
            cases.append(pytest.param(workload, ("reader.reader=dali",), id=f"{workload}-dali", marks=absent))
    return cases


def in_use_below(folder: Path) -> list[str]:
    """Return the files and folders below ``folder`` that this process or a descendant has open or mapped."""
    found: list[str] = []
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        entries = Path(f"/proc/{process.pid}")
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            found += [line.split(maxsplit=5)[-1] for line in (entries / "maps").read_text().splitlines()]
            for entry in (entries / "fd").iterdir():
                with contextlib.suppress(FileNotFoundError):
                    found.append(os.readlink(entry))
    return [name for name in found if Path(name).is_relative_to(folder.resolve())]


@contextlib.contextmanager
def opened_below(folder: Path) -> Iterator[list[str]]:
    """Record the files below ``folder`` that Python code of this process opens in the block."""
    found: list[str] = []
    watched = [folder.resolve()]

    def note(event: str, arguments: tuple[object, ...]) -> None:
        if event == "open" and watched and isinstance(arguments[0], str | os.PathLike):
            path = Path(os.path.abspath(os.fspath(arguments[0])))
            if path.is_relative_to(watched[0]):
                found.append(str(path))

    sys.addaudithook(note)  # stays for the process's life, with nothing to watch
    try:
        yield found
    finally:
        watched.clear()


def at_run_start(monkeypatch: pytest.MonkeyPatch, action: Callable[[], object]) -> None:
    """Do ``action`` immediately before ``run_start`` is logged."""
    original = RunEvents.run_start

    def run_start(self: RunEvents) -> None:
        action()
        original(self)

    monkeypatch.setattr(RunEvents, "run_start", run_start)


def assets(workload: str, data: Path) -> list[str]:
    """Return the override for the assets beside the prepared ``data``, if the recipe needs any."""
    needed = compose([f"benchmark={workload}", "scale=test"])["assets_dir"] is not None
    return [f"assets_dir='{assets_of(data)}'"] if needed else []


def trainer_on(workload: str, folder: Path, output: Path, *overrides: str) -> Trainer:
    """Return the trainer of a short run in this process, on the data in ``folder``."""
    given = [f"data_dir='{folder}'", f"output_dir={output}", *SHORT[workload], *overrides]
    run_config, session = composed(workload, *given)
    assert str(folder) not in repr(run_config), "the workload's configuration names the data folder"
    return Trainer(cli.workload_class(workload), run_config, session, find_rank_info({}), torch.device("cpu"))


@pytest.mark.parametrize("workload", ALL)
def test_what_scores_goes_to_another_process_before_its_data_are_open(workload, data_of):
    run_config, _ = composed(workload, *assets(workload, data_of(workload)))
    layout = Layout(run_config.layout)
    built = cli.workload_class(workload)(run_config, layout)
    scorer = built.evaluation(layout).scorer
    built.close()
    assert type(pickle.loads(pickle.dumps(scorer))) is type(scorer)


@pytest.mark.slow_cases(
    "dlrm", "gpt3", "llama2_70b_lora", "maskrcnn", "minigo", "oc20", "openfold", "retinanet", "ssd300", "unet3d"
)
@pytest.mark.parametrize(("workload", "overrides"), readers())
def test_data_that_arrive_at_run_start_are_early_enough(workload, overrides, data_of, tmp_path, monkeypatch):
    folder = tmp_path / "arrives at run_start"
    trainer = trainer_on(workload, folder, tmp_path / "out", *assets(workload, data_of(workload)), *overrides)
    reached = []

    def arrive() -> None:
        reached.append(folder.exists())
        shutil.copytree(data_of(workload), folder)

    at_run_start(monkeypatch, arrive)
    trainer.train()
    assert reached == [False]


@pytest.mark.slow_cases(
    "dlrm", "gpt3", "llama2_70b_lora", "maskrcnn", "minigo", "oc20", "openfold", "retinanet", "ssd300", "unet3d"
)
@pytest.mark.parametrize(("workload", "overrides"), readers())
def test_data_are_opened_only_after_run_start(workload, overrides, data_of, tmp_path, monkeypatch):
    folder = tmp_path / "there from the beginning"
    shutil.copytree(data_of(workload), folder)
    trainer = trainer_on(workload, folder, tmp_path / "out", *assets(workload, data_of(workload)), *overrides)
    before = []
    at_run_start(monkeypatch, lambda: before.append(in_use_below(folder)))

    after = []
    block_stop = RunEvents.block_stop

    # readers may open files as late as for their first batch
    def stop(self: RunEvents, block: Block, samples: int, throughput: float, time_ms: int | None) -> None:
        after.append(in_use_below(folder))
        block_stop(self, block, samples, throughput, time_ms)

    monkeypatch.setattr(RunEvents, "block_stop", stop)
    with opened_below(folder) as opened:
        at_run_start(monkeypatch, lambda: before.append(list(opened)))
        trainer.train()
    assert before == [[], []]
    assert after
    assert all(after) or opened, "what this test looks at does not show open data"


@pytest.mark.parametrize("workload", ALL)
def test_warm_up_leaves_no_trace(workload):
    run_config, _ = composed(workload)
    layout = Layout(run_config.layout, seed=7)
    built = cli.workload_class(workload)(run_config, layout)
    step = built.build_step()

    def state() -> str:
        tensors = dict(built.named_state())
        for number, updater in enumerate(step.updaters):
            tensors |= {f"{number}.{name}": tensor for name, tensor in updater.named_state()}
        tensors["random"] = torch.get_rng_state()
        return digest(tensors)

    before = state()
    StepRunner(step, built.model, run_config.grad_accumulation_steps).warm_up(built.example_batches())
    assert state() == before
    step([next(iter(built.example_batches()))] * run_config.grad_accumulation_steps)
    assert state() != before, "the same step without the skip flag must change the state"


@pytest.mark.slow_cases("openfold", "stable_diffusion", "unet3d")
@pytest.mark.parametrize("workload", ONE_OF_EACH_FAMILY)
def test_two_ranks_equal_one_rank_that_accumulates(workload, data_of, tmp_path):
    # In float64: batch norm over a few samples multiplies rounding differences a hundredfold in a step.
    steps, data = 2, data_of(workload)
    options = [*EVERY_STEP, "precision=fp64", *SHORT[workload], *ALIVE.get(workload, [])]
    one = suite(*run(workload, data, tmp_path / "one", *options))
    two = suite(*run(workload, data, tmp_path / "two", *options, "scale.gpus_per_node=2"))
    assert one.code in (0, 10), one.errors
    assert two.code in (0, 10), two.errors
    single = flatten(checkpoint(tmp_path / "one", steps)["updaters"])
    moments = [name for name in single if name.split(".")[1].startswith(MOMENTS)]
    assert moments
    moving = [name for name in moments if single[name].count_nonzero()]
    assert len(moving) > 0.9 * len(moments), "gradients vanished"
    double = flatten(checkpoint(tmp_path / "two", steps)["updaters"])
    assert double.keys() == single.keys()
    for name, tensor in single.items():
        norm = tensor.double().norm()
        error = (double[name] - tensor).double().norm() / torch.where(norm > 0, norm, 1.0)
        assert error < 1e-7, f"{name} differs by {error}"


EVERY_STEP = ["checkpoint_every=1", "keep_checkpoints=1000"]


@pytest.fixture(scope="module")
def whole(data_of, tmp_path_factory) -> Callable[[str], Path]:
    """Return a function that returns the output folder of a workload's complete run, which saves every step."""
    made: dict[str, Path] = {}

    def find(workload: str) -> Path:
        if workload not in made:
            output = tmp_path_factory.mktemp("whole") / workload
            done = suite(*run(workload, data_of(workload), output, *EVERY_STEP), **{PICTURE: "1"})
            assert done.code in (0, 10), done.errors
            made[workload] = output
        return made[workload]

    return find


def assert_resumes(workload: str, whole: Path, saved: Path, data: Path, output: Path) -> None:
    """Check that the run that resumes from ``saved`` ends in the state of ``whole``, bit for bit, and is unscored."""
    last = last_step(whole)
    resumed = suite(*run(workload, data, output, *EVERY_STEP, f"resume={saved}"))
    assert resumed.code in (0, 10), resumed.errors
    expected, found = checkpoint(whole, last), checkpoint(output, last)
    for kind in ("samples", "counted"):
        assert expected["progress"][kind] == found["progress"][kind]
    expected_state, found_state = flatten(expected), flatten(found)
    assert expected_state.keys() == found_state.keys()
    different = [name for name, tensor in expected_state.items() if not torch.equal(tensor, found_state[name])]
    assert not different, f"resumed from {saved.name}"
    verdict = judge(next(output.glob("*.log")))
    assert verdict.kind == "refused"


def last_step(output: Path) -> int:
    """Return the steps of the checkpoints of a run."""
    return max(int(path.name[5:]) for path in (output / "checkpoints").glob("step_*"))


@pytest.mark.slow_cases("openfold")
@pytest.mark.parametrize("workload", [each for each in ONE_OF_EACH_FAMILY if each.id not in TIMED_DATA])
def test_resuming_gives_the_same_weights_bit_for_bit(workload, whole, data_of, tmp_path):
    step = random.SystemRandom().randint(1, last_step(whole(workload)) - 1)
    saved = whole(workload) / "checkpoints" / f"step_{step:08d}"
    assert_resumes(workload, whole(workload), saved, data_of(workload), tmp_path / "resumed")


def test_what_a_killed_run_has_saved_is_whole(whole, data_of, tmp_path):
    workload = toy.NAME
    data, last = data_of(workload), last_step(whole(workload))
    kill_after = random.SystemRandom().randint(1, last - 1)

    killed = tmp_path / "killed"
    reached = killed / "checkpoints" / f"step_{kill_after:08d}"
    with started(run(workload, data, killed, *EVERY_STEP)) as process:
        await_that(reached.exists, process)
        process.send_signal(signal.SIGKILL)
        process.wait()
    # A fast machine may have come to the end before it was killed, after which nothing is left to resume.
    newest = max(path for path in (killed / "checkpoints").glob("step_*") if int(path.name[5:]) < last)
    assert_resumes(workload, whole(workload), newest, data, tmp_path / "resumed")


@pytest.mark.parametrize("workload", ALL)
def test_the_log_is_accepted_as_far_as_synthetic_data_can_be(workload, whole):
    output = whole(workload)
    verdict = judge(output / "mlperf.log", newest_ruleset(workload))  # `ssd` was another benchmark's name later
    assert verdict.kind == "format", verdict.reasons
    assert "not an MLPerf result of any division" in " ".join(verdict.reasons)
    assert (output / "summary.png").stat().st_size > 10_000
    records = [json.loads(line) for line in (output / "metrics_rank0.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(1, len(records) + 1))
    assert {"samples", "loss", "step_ms", "data_wait_ms"} <= records[0].keys()


def test_a_signal_is_held_back_only_while_the_clock_runs(data_of, tmp_path, monkeypatch):
    handlers = {}
    for name in ("settings", "run_start"):
        original = getattr(RunEvents, name)

        def seen(self: RunEvents, *arguments: object, name: str = name, original=original) -> None:
            handlers[name] = signal.getsignal(signal.SIGTERM)
            original(self, *arguments)

        monkeypatch.setattr(RunEvents, name, seen)
    before = signal.getsignal(signal.SIGTERM)
    trainer_on(toy.NAME, data_of(toy.NAME), tmp_path / "out").train()
    assert handlers["settings"] == before, "a long initialisation must end at once"
    assert handlers["run_start"] != before
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_closes_the_log_as_aborted_and_leaves_a_checkpoint_to_resume(data_of, tmp_path, signum, code):
    output = tmp_path / "out"
    with started(endless(data_of(toy.NAME), output)) as process:
        await_that(is_training(output), process)
        process.send_signal(signum)
        done = finish(process, SECONDS)
    assert done.code == code, done.errors
    assert "Traceback" not in done.errors
    log = (output / "mlperf.log").read_text()
    assert log.count('"run_stop"') == 1
    assert '"status": "aborted"' in log
    assert list((output / "checkpoints").glob("step_*"))
