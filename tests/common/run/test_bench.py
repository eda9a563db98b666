"""``bench`` measures step and run of any recipe, and extends the run to the evaluations of the recipe's own batch."""

from __future__ import annotations

import contextlib
import json
import re
from datetime import UTC, datetime
from types import SimpleNamespace

import pytest
import torch

from common import cli
from common.config.schema import BenchConfig
from common.errors import ConfigError
from common.launch.experiment import find_source
from common.ops.catalogue import all_operations
from common.run.bench import _breakdown
from common.run.bench_figures import LABEL, capture_rows, size_rows, table
from common.run.kernel_profile import KernelSpan, kind_of
from common.step.graphs import CaptureCost, StepRunner
from tests.conftest import ROOT


def bench(capsys: pytest.CaptureFixture[str], *overrides: str) -> str:
    """Return the output of a short measurement of BERT's test recipe."""
    few = ["bench.steps=1", "bench.warmup_steps=0"]
    capsys.readouterr()
    assert cli.run(["bench", "benchmark=bert", "scale=test", "device=cpu", *few, *overrides]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("steps", [4, 8])
def test_runs_of_one_and_of_two_blocks_are_measured(data_of, capsys, steps):
    # 16 samples a step and 64 between evaluations: one block, or two.
    printed = bench(capsys, f"data_dir={data_of('bert')}", f"hparams.training_steps={steps}")
    assert re.search(r"^run: with evaluations +[\d.,]+ samples/s, [\d.]+ of the step$", printed, re.MULTILINE)


def test_names_and_values_are_two_columns(capsys):
    printed = bench(capsys, "bench.only=step")
    values = {re.match(r"\S+(?: \S+)* {2,}", line).end() for line in printed.splitlines()}
    assert len(values) == 1


def test_a_space_follows_a_name_that_is_wider_than_its_column():
    name = "n" * (LABEL + 3)
    assert table({name: "at most 2", "step": "3 ms"}).splitlines() == [f"{name} at most 2", f"{'step':<{LABEL}}3 ms"]


def test_mean_sizes_of_a_sample_stand_beside_their_rates():
    found = size_rows("step", {"atoms": 75.25, "edges": 2700.0}, 2.0)
    assert found == {"step: a sample on average": "75.2 atoms (150.5/s), 2,700.0 edges (5,400/s)"}
    assert size_rows("step", {}, 2.0) == {}


def test_lines_of_planned_memory_are_aligned_in_the_column_of_values(capsys):
    few = ["bench.only=step", "bench.steps=1", "bench.warmup_steps=0"]
    assert cli.run(["bench", "benchmark=dlrm_dcnv2", "scale=test", "device=cpu", *few]) == 0
    lines = capsys.readouterr().out.splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("planned memory"))
    assert lines[first][LABEL:].startswith("rank  lookups/sample  rows and state, GB  tables")
    assert re.match(rf" {{{LABEL}}} +0 +214\.00 +0\.\d{{3}}  C1, C2, ", lines[first + 1])
    assert not lines[first + 2].startswith(" ")


def test_energy_is_read_after_the_warm_up_and_after_the_last_repetition(monkeypatch, capsys):
    log = []

    class Meter:
        def __init__(self, gpu, interval_seconds):
            self.close, self.means, self.sent_bytes = lambda: None, dict, lambda: None

        def energy_joules(self):
            log.append("energy")
            return 1.0

    call = StepRunner.__call__
    monkeypatch.setattr(StepRunner, "__call__", lambda *given: (log.append("iteration"), call(*given))[1])
    for module in ("bench", "kernel_profile"):
        monkeypatch.setattr(f"common.run.{module}.meet", lambda cuda: log.append("all have run"))
    monkeypatch.setattr("common.run.bench.GpuMeter", Meter)
    bench(capsys, "bench.only=step", "bench.warmup_steps=2", "bench.steps=2", "bench.repetitions=2")
    once = ["all have run", "iteration", "iteration"]
    assert log[-11:] == ["iteration", "iteration", "all have run", "energy", *once, *once, "energy"]


def test_gaps_are_the_time_in_which_no_kernel_ran(monkeypatch):
    kernels = [KernelSpan("gemm", 0.0, 1000.0), KernelSpan("ncclDevKernel_SendRecv", 500.0, 3000.0)]
    monkeypatch.setattr("common.run.bench.recorded", lambda before, work: (kernels, 0.005))
    printed, found = _breakdown(SimpleNamespace(on_stream=contextlib.nullcontext), [], 1)
    assert re.search(r"^  no kernel \(gaps\) +2\.000 ms$", printed, re.MULTILINE)
    assert (found.compute_ms, found.communication_ms, found.exposed_ms) == (1.0, 2.5, 2.0)


@pytest.mark.parametrize(
    ("iteration", "steps", "before", "profiled"),
    [(0.01, 200, 50, 10), (0.1, 100, 25, 5), (2.8, 3, 1, 1), (60.0, 1, 1, 1)],
)
def test_bench_seconds_limits_the_number_of_iterations(iteration, steps, before, profiled):
    options = BenchConfig(seconds=10.0).within(iteration)
    assert (options.steps, options.warmup_steps, options.profile_steps) == (steps, before, profiled)
    assert BenchConfig().within(iteration) == BenchConfig()
    assert BenchConfig(seconds=1.0, warmup_steps=0).within(iteration).warmup_steps == 0
    shared = BenchConfig(seconds=10.0, repetitions=4).within(iteration)
    assert (shared.warmup_steps, shared.profile_steps) == (before, profiled)
    assert shared.steps == max(1, min(200, int(10.0 / iteration / 4)))


def test_an_iteration_longer_than_bench_seconds_is_timed_once(tmp_path, capsys):
    printed = bench(
        capsys, "bench.seconds=1e-6", "bench.steps=50", "bench.warmup_steps=20", f"data_dir={tmp_path / 'no'}"
    )
    assert "1 timed, 1 before them: bench.seconds" in printed


def test_the_report_has_the_median_of_the_repetitions_and_the_phases(tmp_path, capsys):
    report = tmp_path / "report.json"
    printed = bench(capsys, "bench.only=step", "bench.repetitions=3", f"bench.report={report}")
    found = json.loads(report.read_text())
    assert found["step_ms"] == sorted(found["repetitions_ms"])[1]
    assert [rank["step_ms"] for rank in found["by_rank"]] == [found["step_ms"]]
    assert all(rank["host_cores"] > 0 and rank["host_memory_bytes"] > 1e8 for rank in found["by_rank"])
    assert "kernels" not in found
    assert found["without_traffic"] is None
    origin = found["provenance"]
    assert datetime.fromisoformat(origin["date"]).tzinfo == UTC
    assert origin["commit"] == find_source().commit
    assert "bench.only=step bench.repetitions=3" in origin["command"]
    assert "bench.report" not in origin["command"]
    assert origin["machine"]["other_software_stack"]["torch_version"] == torch.__version__
    phases = ["imports", "waiting for a turn", "joining ranks", "build", "warm-up", "capture", "measuring"]
    assert list(found["seconds"]) == phases
    assert re.search(rf"^seconds of this process +{phases[0]} \d", printed, re.MULTILINE)
    assert re.search(r"^step +[\d.]+ ms \(median of [\d.]+, [\d.]+, [\d.]+\)", printed, re.MULTILINE)


@pytest.mark.parametrize("traffic", ["false", "both"])
@pytest.mark.parametrize("command", ["train", "series"])
def test_a_run_that_sends_no_gradients_is_refused(capsys, tmp_path, command, traffic):
    words = ["benchmark=bert", "scale=test", "device=cpu", f"bench.traffic={traffic}"]
    folders = {"train": f"output_dir={tmp_path}", "series": f"launch.results={tmp_path}"}
    first = ["series", "open"] if command == "series" else [command]
    assert cli.run([*first, *words, folders[command]]) == ConfigError.exit_code
    assert f"bench.traffic={traffic}: ranks that send no gradients train different models" in capsys.readouterr().err


def test_the_cost_of_graphs_is_a_row():
    assert capture_rows(CaptureCost()) == {}
    rows = capture_rows(CaptureCost(16, 2.25, 6_604_000_000))
    assert rows == {"CUDA graphs of the step": "16, captured in 2.2 s, 6.60 GB in their pools and inputs"}


def test_bench_only_run_does_not_measure_the_step(data_of, tmp_path, capsys):
    report = tmp_path / "report.json"
    printed = bench(capsys, f"data_dir={data_of('bert')}", "bench.only=run", f"bench.report={report}")
    assert re.search(r"^run: with evaluations +[\d.,]+ samples/s$", printed, re.MULTILINE)
    assert not re.search(r"^step ", printed, re.MULTILINE)
    found = json.loads(report.read_text())
    assert "step_ms" not in found
    assert found["run"]["samples_per_second"] > 0


def test_bench_only_run_needs_data(tmp_path, capsys):
    words = ["bench", "benchmark=bert", "scale=test", "device=cpu", "bench.only=run", f"data_dir={tmp_path / 'none'}"]
    assert cli.run(words) == ConfigError.exit_code
    assert f"bench.only=run: there are no prepared data in {tmp_path / 'none'}" in capsys.readouterr().err


def test_without_data_only_the_step_is_measured(tmp_path, capsys):
    printed = bench(capsys, f"data_dir={tmp_path / 'none'}")
    assert re.search(r"^step +[\d.]+ ms, [\d.,]+ samples/s", printed, re.MULTILINE)
    assert f"not measured: there are no prepared data in {tmp_path / 'none'}" in printed


def test_a_step_whose_gradients_are_not_finite_is_reported_as_not_valid(capsys):
    assert "not valid" not in bench(capsys, "bench.only=step")
    printed = bench(capsys, "bench.only=step", "hparams.base_learning_rate=1.0e+30", "bench.warmup_steps=2")
    assert re.search(r"^step: not valid +the last gradients were not finite", printed, re.MULTILINE)


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("sm90_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc_tilesize256x64x32", "convolution forward"),
        ("sm90_xmma_dgrad_implicit_gemm_indexed_bf16bf16_bf16f32_f32_nhwckrsc_nhwc", "convolution backward"),
        ("sm80_xmma_wgrad_implicit_gemm_indexed_bf16bf16_bf16f32_f32_nhwckrsc_nhwc", "convolution backward"),
        ("void implicit_convolveNd_sgemm<__nv_bfloat16, 3, 128, 5, 5, 3, 3, 3, 1>", "convolution, either way"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_31", "attention"),
        ("void at::native::(anonymous namespace)::indexSelectLargeIndex<float, long>", "embedding"),
        ("void at::native::embedding_backward_feature_kernel<float>", "embedding"),
        ("nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_NNT", "matrix product"),
        ("void (anonymous namespace)::softmax_warp_forward<c10::BFloat16, float, 9, false, false>", "cross-entropy"),
        ("dropout_add_norm_backward_kernel", "dropout and layer norm"),
        ("c10d::symmetric_memory::barrier_kernel(unsigned int**, int, int, int, unsigned long)", "communication"),
        ("Memcpy DtoH (Device -> Pinned)", "copy from or to the host"),
        ("Memcpy DtoD (Device -> Device)", "copy and fill"),
        ("Memcpy PtoP (Device -> Device)", "communication"),
        ("_add_pieces_kernel", "optimizer"),
        ("unknown_kernel", "other"),
    ],
)
def test_kernels_of_libraries_have_a_kind(kernel, kind):
    assert kind_of(kernel) == kind


@pytest.mark.parametrize("key", [key for key, operation in all_operations().items() if operation.kernel_names])
def test_every_kernel_of_an_operation_has_a_kind_of_the_operation(key):
    operation = all_operations()[key]
    folder = ROOT / key.partition(":")[0].replace(".", "/")
    kernels = {
        name
        for path in folder.glob("*kernels.py")
        for name in re.findall(r"^def (\w+_kernel)\(", path.read_text(), re.MULTILINE)
    }
    own = {kind for kind, _ in operation.kernel_names}
    assert {kernel: kind_of(kernel) for kernel in kernels if kind_of(kernel) not in own} == {}
