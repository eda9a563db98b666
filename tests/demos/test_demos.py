"""The demos reach their targets on a CPU, and MLCommons' checker accepts their logs."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from common import cli
from common.mlperf.compliance import check_lines
from common.mlperf.parsed_log import read_log
from common.mlperf.rules import rules_for
from tests.conftest import suite

DEMOS = {
    "resnet": "accuracy 0.9",
    "bert": "masked_lm_accuracy 0.",
    "unet3d": "mean_dice 0.",
    "llama2_70b_lora": "eval_loss 0.",
    "llama31_8b": "log_perplexity 3.",
    "gpt3": "log_perplexity 2.6",
    "flux1": "eval_loss 0.",
    "retinanet": "mean_average_precision 0.",
    "ssd300": "mean_average_precision 0.",
    "maskrcnn": "SEGM 0.",
    "rnnt": "word_error_rate 0.",
    "rgat": "accuracy 0.",
    "dlrm": "auc 0.",
    "dlrm_dcnv2": "auc 0.",
    "stable_diffusion": "CLIP 0.",
    "cosmoflow": "mean_absolute_error 0.",
    "deepcam": "mean_iou 0.",
    "minigo": "win_rate 0.",
    "oc20": "force_mae 0.",
    "openfold": "lddt_ca 0.",
}
"""Workload -> a text in the output of a success."""

OWN: dict[str, set[tuple[str, str]]] = {
    "resnet": set(),
    "bert": {("target", "eval_accuracy")},
    "unet3d": {("target", "eval_accuracy"), ("check", "train_samples"), ("check", "eval_samples")},
    "llama2_70b_lora": {("check", "lora_rank"), ("check", "train_samples")},
    "llama31_8b": {("target", "eval_accuracy"), ("check", "max_sequence_length"), ("check", "eval_samples")},
    "gpt3": {("check", key) for key in ("max_sequence_length", "init_checkpoint_step", "opt_base_learning_rate")},
    "flux1": {("check", "evaluation_frequency")},
    "retinanet": set(),
    "ssd300": {("target", "eval_accuracy"), ("end", ""), ("check", "train_samples")},
    "maskrcnn": {("target", "eval_accuracy"), ("check", "opt_base_learning_rate"), ("check", "num_image_candidates")},
    "rnnt": {
        ("target", "eval_accuracy"),
        ("check", "eval_samples"),
        *(("check", f"data_speed_perturbaton_{end}") for end in ("min", "max")),
    },
    "rgat": set(),
    "dlrm": {("target", "eval_accuracy")},
    "dlrm_dcnv2": {("target", "eval_accuracy"), ("check", "eval_samples")},
    "stable_diffusion": {("target", "aggregated_eval_accuracy")},
    "cosmoflow": {("check", "train_samples"), ("check", "eval_samples")},
    "deepcam": {("check", "train_samples"), ("check", "eval_samples")},
    "minigo": {("check", f"{kind}_selfplay_games_per_generation") for kind in ("actual", "min")},
    "oc20": {("check", "train_samples"), ("check", "eval_samples")},
    "openfold": {
        *(
            ("check", key)
            for key in ("train_samples", "eval_samples", "target_avg_lddt_ca_value", "num_recycling_iters")
        ),
        *(("check", f"max_{key}") for key in ("extra_msa", "msa_clusters", "templates")),
        *(
            ("check", key)
            for key in ("init_checkpoint_sha256sum", "model_parameters_count", "train_sequence_crop_size")
        ),
        ("target", "eval_accuracy"),
    },
}
"""Findings of the closed division's rules that a demo's log may have: it has its own target, network and data set."""

SEEDS = {"unet3d": 12}
"""Seeds other than 1. With other seeds the demos reach their targets, too: 3D U-Net after 12 to 42 of its 60 epochs,
Llama after 4 to 6 of 20 evaluations."""


TARGET_IN_OPEN = {"llama31_8b": "v['value'] < 1.0", "openfold": "v['value'] >= 0.8 and v['value'] <= 1.0"}
"""Workloads whose open-division rules have a target that the demo misses. Llama's is a placeholder, which no perplexity
reaches."""

AS_IN_CLOSED = {"gpt3": ["max_sequence_length", "init_checkpoint_step", "opt_base_learning_rate"]}
"""Workloads whose open-division rules are those of the closed one, and the keys that a small network violates."""

TARGETS = {
    "llama2_70b_lora": "target <= 0.",
    "llama31_8b": "target <= 3.",
    "gpt3": "target <= 2.69",
    "flux1": "target <= 0.586",
    "rnnt": "target <= 0.",
    "cosmoflow": "target <= 0.124",
    "oc20": "target <= 0.036",
}
"""Text of the target for workloads whose metric falls."""


LONG = (
    "bert", "unet3d", "stable_diffusion", "retinanet", "maskrcnn", "dlrm", "resnet", "minigo", "gpt3", "openfold",
    "rnnt",
)  # fmt: skip
"""Demos that CI leaves to `make demo`: they take minutes, resemble another one, also run under Slurm, or, as MiniGo's
self-play, depend on the load of the machine."""


@pytest.mark.demo
@pytest.mark.timeout(2000)
@pytest.mark.parametrize(
    "workload", [pytest.param(name, id=name, marks=pytest.mark.slow if name in LONG else ()) for name in DEMOS]
)
def test_the_demo_reaches_its_target_and_its_log_passes_the_compliance_checker(workload, tmp_path):
    rules = rules_for(workload)
    raw, data, output = tmp_path / "raw", tmp_path / f"{workload}-demo", tmp_path / "run"
    name = f"benchmark={workload}"
    assert cli.run(["generate", name, "scale=demo", "--raw-dir", str(raw)]) == 0
    assert cli.run(["prepare", name, "--raw-dir", str(raw), "--data-dir", str(data)]) == 0
    done = suite(
        "train", name, "scale=demo", f"output_dir={output}", f"seed={SEEDS.get(workload, 1)}",
        MLPERF_DATA_DIR=str(tmp_path), timeout=1700,
    )  # fmt: skip
    assert done.code == 0, done.errors
    log = read_log(output / "mlperf.log")
    assert log.status == "success"
    checker = subprocess.run(
        [
            sys.executable, "-m", "mlperf_logging.compliance_checker", "--usage", rules.usage,
            "--ruleset", rules.ruleset, "--log_output", str(tmp_path / "checker.log"), str(output / "mlperf.log"),
        ],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    complaints = [line for line in checker.stderr.splitlines() if line.startswith("WARNING")]
    if workload in AS_IN_CLOSED:
        assert re.findall(r"CHECK for '(\w+)' failed", checker.stderr) == AS_IN_CLOSED[workload], checker.stderr
        assert len(complaints) == 1, checker.stderr  # all of them are one warning
    elif workload in TARGET_IN_OPEN:
        required = f"WARNING -  Failed checks for eval_accuracy : {TARGET_IN_OPEN[workload]}"
        assert complaints == [required], checker.stderr
    else:
        assert checker.returncode == 0, checker.stdout + checker.stderr
    assert set(_closed_division_findings(output / "mlperf.log", rules)) <= OWN[workload]
    target = TARGETS.get(workload, "target >= 0.")
    for text in (target, DEMOS[workload], "seed", "minutes", "not an MLPerf result of any division"):
        assert text in done.errors


def _closed_division_findings(log, rules):
    """Return kind and key of the checker's findings for a log that is read as one of the closed division."""
    closed = log.with_name("closed.log")
    text, replaced = re.subn(r'("submission_division", "value": )"\w+"', r'\1"closed"', log.read_text())
    assert replaced == 1
    closed.write_text(text)
    texts = [event.text for event in read_log(closed).events]
    return [(finding.kind, finding.key) for finding in check_lines(texts, rules.usage, rules.ruleset)]
