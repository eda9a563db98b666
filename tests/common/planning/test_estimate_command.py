"""``mlperf-suite estimate``: tables, JSON, recipes and wrong input."""

import json
import re

import pytest

from common.cli import load, run
from common.config.composition import compose
from common.errors import ConfigError
from common.planning.points import RESULTS
from tests.conftest import suite

LINKS = "{latency_us: 1, gbs: 300}"
SYSTEM = """
name: mine
hardware:
  gpu: NVIDIA H200
  gpus_per_node: 8
  memory_gb: 150
  memory_gbs: 4250
"""


def estimate(capsys, *arguments):
    """Return exit code, output and errors of the command."""
    code = run(["estimate", *map(str, arguments)])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    """Content of the JSON file, output, and the folder with the recipes of an estimate of BERT on 1, 8 and 64 GPUs."""
    folder = tmp_path_factory.mktemp("estimate")
    done = suite(
        "estimate", "bert", "--gpus", "1,8,64", "--batches", "768,4608",
        "--json", str(folder / "estimates.json"), "--write-recipe", str(folder / "recipes"),
    )  # fmt: skip
    assert done.code == 0, done.errors
    return json.loads((folder / "estimates.json").read_text()), done.output, folder / "recipes"


def test_one_gpu_has_the_measured_rate(bert):
    content, _, _ = bert
    (one,) = (each for each in content["estimates"] if each["layout"]["gpus"] == 1 and each["best"])
    measured = json.loads((RESULTS / "2026-11-29-one-and-two-h200.json").read_text())["results"]
    rates = [
        each["figures"]["samples_per_second"]
        for each in measured
        if each["job"]["benchmark"] == "bert" and each["job"]["gpus"] == 1
    ]
    training = one["steps"] * one["step_seconds"]
    assert min(rates) < one["convergence"]["samples"] / training < 1.05 * max(rates)  # several micro-batches an update


def test_the_time_is_the_sum_of_its_parts(bert):
    for each in bert[0]["estimates"]:
        assert each["step_seconds"] == pytest.approx(sum(seconds or 0 for seconds in each["step"].values()))
        total = each["steps"] * each["step_seconds"] + each["evaluations"] * each["evaluation"]
        assert each["seconds"] == pytest.approx(total + each["last_evaluation"])
        low, high = each["interval"]
        assert low < each["seconds"] < high
        assert 0 < each["efficiency"] < 1


def test_each_number_of_gpus_has_one_best_estimate(bert):
    content, output, _ = bert
    for gpus in (1, 8, 64):
        rows = [each for each in content["estimates"] if each["layout"]["gpus"] == gpus]
        (best,) = (each for each in rows if each["best"])
        assert best["interval"][1] == min(each["interval"][1] for each in rows)
        assert f"\n{gpus} GPU" in output
    assert len(re.findall(r"^\d+ \*", output, re.MULTILINE)) == 3


def test_idle_parts_of_the_energy_have_names(bert):
    many = next(each for each in bert[0]["estimates"] if each["layout"]["gpus"] == 64 and each["best"])
    assert many["joules"]["idle: waiting for communication"] > 0
    assert many["joules"]["training"] > many["joules"]["idle: waiting for the slowest GPU"] > 0


def test_train_accepts_the_overrides(bert):
    for each in bert[0]["estimates"]:
        run, _ = load(compose(each["overrides"]))
        layout = each["layout"]
        assert (run.world_size, run.global_batch) == (layout["gpus"], layout["global_batch"])
        assert (run.micro_batch, run.grad_accumulation_steps) == (layout["micro_batch"], layout["accumulation"])
        assert run.evaluation.ranks == layout["evaluation_ranks"]


def test_train_accepts_the_written_recipes(bert):
    content, _, folder = bert
    best = next(each for each in content["estimates"] if each["layout"]["gpus"] == 64 and each["best"])
    done = suite("train", "--config-dir", str(folder), "benchmark=bert", "scale=64xH200_planned", "--cfg", "job")
    assert done.code == 0, done.errors
    assert f"\nmicro_batch: {best['layout']['micro_batch']}\n" in done.output
    assert f"global_batch_size: {best['layout']['global_batch']}\n" in done.output
    assert "\n  nodes: 8\n" in done.output


def test_recipes_of_other_nodes_have_their_number_of_gpus(tmp_path):
    system = tmp_path / "mine.yaml"
    links = f"  node_link: {LINKS}\n  network_link: {LINKS}\n"
    system.write_text(SYSTEM.replace("gpus_per_node: 8", "gpus_per_node: 4") + links)
    fixed = ("--gpus", "16", "--batches", "768", "--micro-batch", "48", "--system", str(system))
    assert suite("estimate", "bert", *fixed, "--write-recipe", str(tmp_path)).code == 0
    done = suite("train", "--config-dir", str(tmp_path), "benchmark=bert", "scale=16xH200_planned", "--cfg", "job")
    assert "\n  nodes: 4\n  gpus_per_node: 4\n" in done.output, done.errors


def test_the_recipes_are_trained_with_the_system_one_command_for_each(bert):
    _, output, folder = bert
    commands = [line for line in output.splitlines() if "--config-dir" in line]
    train = f"mlperf-suite train --config-dir {folder} benchmark=bert"
    assert commands == [f"{train} scale={gpus}xH200_planned system=h200" for gpus in (1, 8, 64)]


@pytest.mark.slow
def test_one_gpu_has_no_verdict_and_no_efficiency_above_one(tmp_path):
    path = tmp_path / "one.json"
    done = suite("estimate", "resnet", "--gpus", "1", "--batches", "1632", "--json", str(path))
    assert done.code == 0, done.errors
    assert "pay" not in done.output
    assert "added GPU" not in done.output
    (one,) = json.loads(path.read_text())["estimates"]
    assert one["layout"]["accumulation"] > 1
    assert 0.95 < one["efficiency"] < 1  # evaluations and input take a part


def test_input_that_was_not_measured_is_not_known_rather_than_zero(bert):
    content, output, _ = bert
    assert all(each["step"]["input"] is None and each["reader_limits"] == {} for each in content["estimates"])
    assert re.search(r"^waiting for input +not known +not known +not known$", output, re.MULTILINE)
    assert "Input: not known, so the estimates have no time for it." in output
    assert "mlperf-suite bench benchmark=bert scale=1xH200" in output


def test_input_is_a_part_of_the_step_where_it_was_measured(capsys, tmp_path):
    """The slow reader of a report decides, with the steps of docs/results."""
    path = tmp_path / "reader.json"
    reader = {"samples_per_second": 100.0, "processor_seconds": 0.01, "pause_ms": 0.0}
    report = {"benchmark": "bert", "device": "NVIDIA H200", "micro_batch": 96, "samples": 96, "reader": reader}
    path.write_text(json.dumps({**report, "provenance": {"command": "mlperf-suite bench benchmark=bert scale=1xH200"}}))
    steps = RESULTS / "2026-11-29-one-and-two-h200.json"
    arguments = ["--gpus", "8", "--batches", "768", "--json", tmp_path / "estimates.json"]
    code, output, errors = estimate(capsys, "bert", *arguments, "--measured", path, steps)
    assert code == 0, errors
    (best,) = json.loads((tmp_path / "estimates.json").read_text())["estimates"]
    assert best["step_seconds"] == pytest.approx(0.96)  # 96 sequences of a replica, 100 a second
    assert best["reader_limits"] == {"reader": 100.0, "processor cores": pytest.approx(1400)}  # 14 cores, 10 ms each
    assert "a replica reads 100 samples/s; limits: reader 100, processor cores 1,400, storage not known." in output
    assert "idle: waiting for input" in output


def test_known_gaps_of_the_model_are_named(capsys):
    code, output, _ = estimate(capsys, "rgat", "--gpus", "8", "--batches", "16384")
    assert code == 0
    assert "\nnot modelled: GPUs exchange graph and features" in output


@pytest.mark.parametrize(("benchmark", "batch"), [("dlrm_dcnv2", 55296), ("gpt3", 2048)])
def test_a_recipe_with_other_data_or_fewer_layers_has_no_estimate(capsys, benchmark, batch):
    code, _, errors = estimate(capsys, benchmark, "--gpus", "1", "--batches", batch)
    assert code == ConfigError.exit_code
    assert f"{benchmark}, --gpus 1: 1xH200 trains another data set or fewer layers" in errors


def test_gpt3_has_estimates(capsys):
    code, output, errors = estimate(capsys, "gpt3", "--gpus", "512", "--batches", "2048", "--micro-batch", "2")
    assert code == 0, errors
    assert "512 *" in output


def test_a_step_of_fewer_blocks_is_no_point_of_the_whole_network(capsys):
    code, _, errors = estimate(capsys, "flux1", "--gpus", "8")
    assert code == ConfigError.exit_code
    assert "no measured step of flux1 on NVIDIA H200" in errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batches", "100"], r"global batch 100 is outside the RCPs of bert in v\d\.\d \(.*448"),
        (["--gpus", "12"], r"--gpus 12: a node of h200 has 8 GPUs: use 1 to 8, or a multiple of 8"),
        (["--layout", "tp=2"], r"--layout tp=2: bert has the axes dp"),
        (["--gpus", "8", "--batches", "768", "--micro-batch", "7"], r"micro_batch=7: .* each can have .96, 48,"),
        (["--gpus", "8", "--batches", "450"], r"8 replicas do not divide the batch"),
        (["--system", "auto"], r"system auto has no section hardware: .*doctor --write-system"),
        (["--system", "h100"], r"no measured step of bert on NVIDIA H100 .*measure bert"),
        (["--measured", "missing.json"], r"missing\.json: cannot be read: No such file"),
        (["--measured", "pyproject.toml"], r"pyproject\.toml: is no readable JSON"),
        (["--json", "docs"], r"--json docs: is a folder"),
        (["--page", "README.md/page.html"], r"--page README\.md/page\.html: .*README\.md is no folder"),
        (["--write-recipe", "README.md"], r"--write-recipe README\.md/recipe/bert\.yaml: .*README\.md is no folder"),
    ],
)  # fmt: skip
def test_wrong_input_is_one_clear_error(capsys, arguments, message):
    code, _, errors = estimate(capsys, "bert", *arguments)
    assert code == ConfigError.exit_code
    assert re.search(message, errors), errors
    assert errors.count("\n") == 1


@pytest.mark.slow
def test_a_system_without_links_is_an_error_for_several_gpus(capsys, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(SYSTEM)
    code, _, errors = estimate(capsys, "bert", "--system", path, "--gpus", "8", "--batches", "768")
    assert code == ConfigError.exit_code
    assert "hardware.node_link is missing, and 8 GPUs communicate through it" in errors
    path.write_text(f"{SYSTEM}  node_link: {LINKS}\n")
    code, output, errors = estimate(capsys, "bert", "--system", path, "--gpus", "8", "--batches", "768")
    assert code == 0, errors
    assert "system=mine" not in output  # `train` reads names of systems only
    assert f"leave {path} out and use system=auto" in output
    code, _, errors = estimate(capsys, "bert", "--system", path, "--gpus", "16", "--batches", "768")
    assert "hardware.network_link is missing" in errors


def test_a_layout_that_does_not_fit_into_memory_is_an_error(capsys, tmp_path):
    path = tmp_path / "small.yaml"
    path.write_text(SYSTEM.replace("150", "40"))
    code, _, errors = estimate(capsys, "llama31_8b", "--system", path, "--gpus", "1", "--batches", "16")
    assert code == ConfigError.exit_code
    assert re.search(r"this layout needs [\d.]+ GB of 40\.0", errors)


def test_a_benchmark_without_reference_points_is_an_error(capsys):
    code, _, errors = estimate(capsys, "dlrm")
    assert code == ConfigError.exit_code
    assert "dlrm has no RCPs" in errors
