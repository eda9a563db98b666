"""MiniGo as a workload: configuration, loss, learning rate, divisions, and the log of a short run."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from benchmarks.minigo.config import Hparams
from benchmarks.minigo.data import FORMAT, START
from benchmarks.minigo.features import PADDED_PLANES, PLANES
from benchmarks.minigo.model import MiniGo
from benchmarks.minigo.models import write_model
from benchmarks.minigo.prepare import PUBLISHED, prepare
from benchmarks.minigo.workload import MiniGoWorkload
from common import cli
from common.config.composition import compose
from common.data import manifest
from common.distributed.layout import Layout
from common.errors import CheckpointError, ConfigError, DataError
from common.formats.safetensors_file import write_tensors
from common.launch.data_folder import refuse_custom, require_prepared
from common.mlperf.admission import admit
from common.mlperf.parsed_log import ParsedLog, read_log
from common.mlperf.verdict import judge
from tests.benchmarks.minigo.sizes import LARGE, SMALL
from tests.conftest import suite


def built(*overrides: str) -> MiniGoWorkload:
    run, _ = cli.load(compose(["benchmark=minigo", "scale=test", "device=cpu", *overrides]))
    return MiniGoWorkload(run, Layout(run.layout, seed=3))


def test_the_rules_recipe_has_the_networks_of_the_rules():
    for scale, parameters in (("1xH200", 736_671), ("mini9", 692_343)):
        run, _ = cli.load(compose(["benchmark=minigo", f"scale={scale}", "device=cpu"]))
        model = MiniGo(run.workload.facts.architecture)
        assert sum(tensor.numel() for tensor in model.parameters()) == parameters
        assert run.workload.facts.search.board == (19 if scale == "1xH200" else 9)
        assert (run.workload.facts.architecture == LARGE) == (scale == "1xH200")


def test_evaluation_games_have_no_chance_and_no_resignation():
    """100 readouts, no fast moves, no noise, no random choice, passes allowed."""
    run, _ = cli.load(compose(["benchmark=minigo", "scale=1xH200", "device=cpu"]))
    settings = run.workload.facts.evaluation
    assert (settings.readouts, settings.fast_probability, settings.noise_mix, settings.soft_pick) == (100, 0, 0, False)
    assert (settings.resign_disabled, settings.allow_pass, settings.target_pruning) == (1.0, True, False)
    assert (settings.virtual_losses, settings.komi, settings.restrict_after) == (4, 7.5, 4)


def hparams(rates: tuple[float, ...], boundaries: tuple[int, ...]) -> Hparams:
    return Hparams("test", "sgd", 4096, rates, boundaries, 0.9, 1e-4)


def test_a_boundary_is_the_last_step_of_its_rate():
    """TensorFlow's documentation of piecewise_constant: the boundary 100,000 makes 100,001 steps of the first rate."""
    schedule = hparams((0.016, 0.16, 0.016, 0.0016), (128, 10_000, 20_000)).schedule()
    expected = {0: 0.016, 128: 0.016, 129: 0.16, 10_000: 0.16, 10_001: 0.016, 20_000: 0.016, 20_001: 0.0016}
    for step, rate in expected.items():
        assert schedule(torch.tensor(step)).item() == torch.tensor(rate).item()


def test_rates_and_boundaries_of_other_numbers_are_one_clear_error():
    with pytest.raises(ConfigError, match=r"lr_rates=\[0\.1, 0\.2\]: one rate more than lr_boundaries=\[\]"):
        hparams((0.1, 0.2), ())


def test_the_loss_of_a_micro_batch_is_that_of_the_turned_positions():
    """Planes and distribution of every example are turned by its symmetry, here with NumPy and in float64."""
    workload = built("precision=fp64")
    batch = next(iter(workload.example_batches()))
    tensors = {name: tensor.numpy() for name, tensor in batch.tensors.items()}
    board, count = 5, len(tensors["bits"])
    flat = np.unpackbits(tensors["bits"], axis=1)[:, : PLANES * board**2]
    planes = np.zeros((count, PADDED_PLANES, board, board))
    pi = tensors["pi"].astype(np.float64)
    for row, symmetry in enumerate(tensors["symmetry"]):
        for number, plane in enumerate(flat[row].reshape(PLANES, board, board)):
            planes[row, number] = turned(plane, symmetry)
        pi[row, :-1] = turned(pi[row, :-1].reshape(board, board), symmetry).reshape(-1)
    statistics = {name: buffer.clone() for name, buffer in workload.model.named_buffers()}
    found = workload.loss(batch)
    for name, buffer in workload.model.named_buffers():
        buffer.copy_(statistics[name])
    logits, value = workload.model(torch.from_numpy(planes).contiguous(memory_format=torch.channels_last))
    expected = F.cross_entropy(logits, torch.from_numpy(pi))
    expected = expected + 0.5 * F.mse_loss(value, batch.tensors["outcome"].double())
    torch.testing.assert_close(found.total.detach(), expected.detach(), rtol=1e-7, atol=0)
    workload.close()


def turned(plane: np.ndarray, symmetry: int) -> np.ndarray:
    """Return a plane after a symmetry: 4 to 7 mirror the columns first, and then all are quarter turns."""
    return np.rot90(plane[:, ::-1] if symmetry >= 4 else plane, symmetry % 4)


def test_training_starts_from_the_weights_of_the_assets(tmp_path):
    start = MiniGo(built().model.architecture, generator=torch.Generator().manual_seed(11)).state_dict()
    write_tensors(tmp_path / START, start, {})
    model = built(f"assets_dir={tmp_path}").model
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, start[name], rtol=0, atol=0)


def test_a_start_of_another_network_is_one_clear_error(tmp_path):
    write_tensors(tmp_path / START, MiniGo(SMALL).state_dict(), {})
    with pytest.raises(
        CheckpointError, match=r"start\.safetensors is a model of another network: .*give the assets_dir"
    ):
        built(f"assets_dir={tmp_path}")


def test_a_resumed_run_and_score_refuse_another_target(data_of, tmp_path):
    data, other, run = data_of("minigo"), tmp_path / "other", tmp_path / "run"
    workload = built("selfplay.ranks=1", "selfplay.training_ranks_play=false", "scale.gpus_per_node=2")
    shutil.copytree(data, other)
    write_model(tmp_path / "model.safetensors", workload.model.state_dict(), 1)
    prepare(tmp_path / "nowhere", other, target=tmp_path / "model.safetensors")
    workload.scratch(run, None)
    workload.open_data(data)
    MiniGoWorkload.require_data_of(run, data)
    with pytest.raises(DataError, match=f"the target in {other} is not the one with which the run in {run} began"):
        MiniGoWorkload.require_data_of(run, other)
    workload.scratch(run, 0)
    workload.open_data(data)
    with pytest.raises(DataError, match=f"the target in {other} is not the one"):
        workload.open_data(other)
    workload.scratch(run, None)  # a new run in the same folder
    workload.open_data(other)
    workload.close()


@pytest.mark.parametrize(
    "setting",
    [
        "board=26", "komi=.inf", "readouts=1", "fast_readouts=1", "fast_probability=1.5", "virtual_losses=0",
        "noise_alpha=0.0", "noise_mix=1.5", "value_init_penalty=-0.1", "visit_exponent=-0.1", "resign_low=0.5",
        "resign_disabled=-0.1", "holdout=1.0", "restrict_after=0",
    ],
)  # fmt: skip
def test_a_search_setting_out_of_range_is_refused_by_its_key(setting):
    name = setting.split("=")[0]
    with pytest.raises(ConfigError, match=rf"^benchmark\.facts\.search\.{name}="):
        cli.load(compose(["benchmark=minigo", "scale=demo", "device=cpu", f"benchmark.facts.search.{setting}"]))


def test_the_closed_division_refuses_a_generation_of_fewer_games():
    run, session = cli.load(compose(["benchmark=minigo", "scale=demo", "device=cpu", "submission.division=closed"]))
    with pytest.raises(ConfigError, match="min_selfplay_games_per_generation"):
        admit(run, session)


@pytest.mark.parametrize("division", ["closed", "open"])
def test_the_bootstrap_of_19x19_games_is_custom_data_for_the_open_division_alone(tmp_path, division):
    source = {"fingerprint": "", "description": "games", "prepared": ""}
    manifest.write(tmp_path, PUBLISHED.manifest(FORMAT, {}, {"train_samples": 40_960}, source))
    words = [
        "benchmark=minigo",
        "scale=1xH200",
        "device=cpu",
        f"data_dir={tmp_path}",
        f"submission.division={division}",
    ]
    run, session = cli.load(compose(words))
    if division == "closed":
        with pytest.raises(DataError, match=r"our own.* not the data of minigo, which the closed division needs"):
            refuse_custom(run, session)
    else:
        refuse_custom(run, session)
        assert require_prepared(run, session).benchmark.custom


@pytest.fixture(scope="module")
def first_passes(data_of, tmp_path_factory) -> tuple[Path, ParsedLog]:
    """Return the folder and log of a run of two generations, whose target the first one reaches."""
    output = tmp_path_factory.mktemp("first_passes") / "run"
    done = suite(
        "train", "benchmark=minigo", "scale=test", "device=cpu", "seed=5", f"data_dir={data_of('minigo')}",
        f"output_dir={output}", "benchmark.targets.win_rate.value=0.0",
    )  # fmt: skip
    assert done.code == 0, done.errors
    return output, read_log(output / "mlperf.log")


def test_the_run_stops_when_its_first_passing_generation_was_saved(first_passes):
    """Generation 4 is that of the bootstrap, so the first generation that a run trains is number 5."""
    output, log = first_passes
    saved_ms = (output / "self-play" / "models" / "000005.safetensors").stat().st_mtime * 1000
    (stop,) = log.all("run_stop")
    trained, _ = log.all("epoch_stop")
    assert trained.time_ms <= saved_ms + 1  # the log has whole milliseconds
    assert saved_ms - 1 <= stop.time_ms <= log.all("epoch_stop")[1].time_ms
    assert all(event.time_ms > log.all("epoch_stop")[1].time_ms for event in log.all("eval_start"))
    assert [event.metadata["epoch_num"] for event in log.all("eval_accuracy")] == [1]
    assert stop.metadata == {**stop.metadata, "status": "success", "epoch_num": 1}


def test_the_log_has_the_keys_of_the_rules(first_passes):
    output, log = first_passes
    assert log.value("train_batch_size") == log.value("global_batch_size") == 16
    assert (log.value("lr_rates"), log.value("lr_boundaries")) == ([0.1], [])
    assert log.value("min_selfplay_games_per_generation") == 2
    games = [each for each in (*log.events, *log.echoes) if each.key == "actual_selfplay_games_per_generation"]
    games.sort(key=lambda each: each.line)  # equal lines of a generation count as repetitions
    assert [event.metadata["epoch_num"] for event in games] == [1] * 5 + [2] * 5
    assert all(event.value >= 2 for event in games)
    assert (log.value("train_samples"), log.value("eval_samples")) == (10, 4)
    verdict = judge(output / "mlperf.log")
    assert (verdict.kind, verdict.ruleset) == ("format", "2.1.0")
    assert verdict.reasons == ("the data are synthetic: not an MLPerf result of any division",)
