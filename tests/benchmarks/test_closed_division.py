"""Workloads in the closed division: settings that the rules fix, logged hyperparameters, the official checker."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from common import cli
from common.config.composition import compose
from common.config.schema import RunConfig, SessionConfig
from common.data.batches import Block
from common.errors import ConfigError
from common.mlperf.admission import admit
from common.mlperf.constraints import missing_hyperparameters
from common.mlperf.events import RunEvents, hyperparameters
from common.mlperf.mllog import RunLog

CLICKS = 4_195_197_692
HPC = ("cosmoflow", "deepcam", "oc20")
HOTNESS = "[1,2,1,2,6,1,1,1,1,7,3,8,1,6,9,5,1,1,1,12,100,27,10,3,1,1]"


def loaded(benchmark: str, assets: Path, *overrides: str) -> tuple[RunConfig, SessionConfig]:
    """The configuration on the fewest GPUs of a usual scale, with a folder of assets where the workload needs one."""
    scale = {"dlrm": "scale=8xA100", "gpt3": "scale=64xH100"}.get(benchmark, "scale=8xH200")
    has_assets = benchmark in ("bert", "gpt3", "llama2_70b_lora", "maskrcnn", "openfold", "retinanet", "ssd300")
    options = [f"assets_dir={assets}"] if has_assets else []
    return cli.load(compose([f"benchmark={benchmark}", "device=cpu", scale, *options, *overrides]))


@pytest.mark.parametrize(
    ("benchmark", "override", "message"),
    [
        ("dlrm", "benchmark.facts.decay_power=1", "sgd_opt_learning_rate_decay_poly_power"),
        ("dlrm", "benchmark.facts.top_mlp=[512,1]", "top_mlp"),
        ("dlrm", "benchmark.eval_samples=1000", "eval_samples"),
        ("dlrm_dcnv2", "hparams.epsilon=1e-7", "opt_adagrad_epsilon"),
        ("dlrm_dcnv2", "benchmark.facts.cross_rank=256", "cross_rank"),
        ("dlrm_dcnv2", f"benchmark.facts.hotness={HOTNESS}", "hotness"),
        ("dlrm_dcnv2", "benchmark.eval_samples=1000", "eval_samples"),
        ("maskrcnn", "hparams.momentum=0.8", r"opt_momentum = 0\.8 breaks the rules' table: 0\.9, as in the reference"),
        ("maskrcnn", "hparams.weight_decay=1e-3", r"opt_weight_decay = 0\.001 breaks the rules' table: 0\.0001"),
        ("maskrcnn", "hparams.image_candidates=6000", "the rules allow 1000 or 12000"),
        ("maskrcnn", "hparams.image_candidates=1500", "num_image_candidates"),
        ("maskrcnn", "hparams.decay_steps=[12000,16500]", "opt_learning_rate_decay_steps = "),
        ("maskrcnn", "benchmark.facts.min_size=600", "min_image_size = 600 breaks the rules' table: 800"),
        ("maskrcnn", "benchmark.targets.SEGM.value=0.3", r"the rules fix 0\.339"),
        ("maskrcnn", "benchmark.facts.rpn_high=0.6", r"the rules fix 0\.7"),
        ("maskrcnn", "hparams.base_learning_rate=0.11", "opt_base_learning_rate"),
        ("openfold", "hparams.beta_1=0.95", r"opt_adam_beta_1 = 0\.95 breaks rule"),
        ("openfold", "benchmark.facts.evoformer_blocks=4", "the rules fix 48"),
        ("openfold", "benchmark.facts.evoformer.msa_dropout=0.1", "the rules fix"),
        ("openfold", f"benchmark.facts.checkpoint_sha256={64 * '0'}", "init_checkpoint_sha256sum"),
        ("retinanet", "benchmark.facts.layers=[3,4,23,3]", r"benchmark\.facts\.layers=\[3, 4, 23, 3\].*the rules fix"),
        ("retinanet", "benchmark.facts.trained_stages=4", r"benchmark\.facts\.trained_stages=4.*the rules fix"),
        ("retinanet", "hparams.beta_1=0.95", r"opt_adam_beta_1 = 0\.95 breaks the rules' table: 0\.9, as in the ref"),
        ("retinanet", "benchmark.facts.nms_threshold=0.6", "the rules fix"),
        ("retinanet", "hparams.weight_decay=1e-4", "opt_weight_decay"),
        (
            "rgat",
            "hparams.beta_2=0.99",
            r"opt_adam_beta_2 = 0\.99 breaks the rules' table: 0\.999, as in",
        ),
        ("rgat", "hparams.weight_decay=0.01", r"opt_weight_decay = 0\.01 breaks the rules' table: 0\.0"),
        ("rgat", "benchmark.facts.dropout=0.1", "dropout"),
        ("rgat", "benchmark.facts.fanouts=[10,10,10]", "fanouts"),
        ("rgat", "benchmark.facts.head_size=64", "head_size"),
        ("rgat", "benchmark.eval_samples=1000", "eval_samples"),
        ("unet3d", "benchmark.facts.oversampling=0.3", "the rules fix"),
        ("unet3d", "benchmark.facts.input_shape=[64,64,64]", "the rules fix"),
        ("unet3d", "hparams.momentum=0", r"hparams\.momentum=0: the reference's SGD"),
        ("ssd300", "hparams.decay_epochs=[41,50]", "opt_learning_rate_decay_boundary_epochs"),
        ("ssd300", "hparams.warmup_epochs=0", "opt_learning_rate_warmup_steps"),
        ("ssd300", "benchmark.targets.mean_average_precision.value=0.2", r"the rules fix 0\.23"),
        ("ssd300", "benchmark.facts.width=32", "the rules fix 64"),
        ("ssd300", "hparams.momentum=0.8", r"opt_momentum = 0\.8 breaks the rules' table: 0\.9, as in the reference"),
    ],
)
def test_the_closed_division_alone_fixes_what_the_rules_fix(benchmark, override, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        admit(*loaded(benchmark, tmp_path, override))
    admit(*loaded(benchmark, tmp_path, override, "submission.division=open"))


@pytest.mark.parametrize(
    ("benchmark", "ruleset", "name"),
    [
        *(("dlrm", ruleset, "dlrm") for ruleset in ("0.7.0", "1.0.0", "1.1.0", "2.0.0", "2.1.0")),
        *(("dlrm_dcnv2", ruleset, "dlrm_dcnv2") for ruleset in ("3.0.0", "4.1.0", "5.1.0", "6.0.0")),
        *(("retinanet", ruleset, "ssd") for ruleset in ("2.0.0", "4.1.0")),
        *(("retinanet", ruleset, "retinanet") for ruleset in ("5.0.0", "5.1.0")),
        *(("rgat", ruleset, "gnn") for ruleset in ("4.0.0", "4.1.0")),
        *(("rgat", ruleset, "rgat") for ruleset in ("5.0.0", "5.1.0")),
        *((name, ruleset, name) for name in HPC for ruleset in ("1.0.0", "2.0.0", "3.0.0")),
        *(("bert", ruleset, "bert") for ruleset in ("1.1.0", "4.1.0", "5.0.0")),
        *(
            ("llama2_70b_lora", name, "llama2_70b_lora")
            for name in ("4.0.0", "4.1.0", "5.0.0", "5.1.0", "6.0.0", "6.1.0")
        ),
        ("maskrcnn", "3.1.0", "maskrcnn"),
        ("ssd300", "1.1.0", "ssd"),
        *(("stable_diffusion", ruleset, "stable_diffusion") for ruleset in ("3.1.0", "4.0.0", "4.1.0", "5.0.0")),
        *(("unet3d", ruleset, "unet3d") for ruleset in ("1.0.0", "3.1.0", "4.0.0")),
        *(("rnnt", ruleset, "rnnt") for ruleset in ("1.1.0", "2.0.0", "3.1.0")),
        ("openfold", "3.0.0", "openfold"),
    ],
)
def test_the_log_has_every_hyperparameter_and_the_name_of_the_round(benchmark, ruleset, name, tmp_path):
    run, session = loaded(benchmark, tmp_path, f"ruleset={ruleset}")
    assert missing_hyperparameters(benchmark, ruleset, hyperparameters(run)) == []
    assert admit(run, session).rules.log_name == name


RUNS = {
    "dlrm": (CLICKS, 89_137_319, 3793 * 55296, 0.8026, "1.05"),  # the only epoch counts from 1 to 2
    "dlrm_dcnv2": (CLICKS, 89_137_319, 3793 * 55296, 0.8028, "0.05"),
    "retinanet": (1_170_301, 24_781, 1, 0.341, None),
    "rgat": (94_605_581, 788_379, 288 * 16384, 0.7201, "0.05"),
    "cosmoflow": (524_288, 65_536, 1, 0.1239, None),
    "deepcam": (121_266, 15_158, 1, 0.8201, None),
    "oc20": (2_000_000, 999_866, 1, 0.0359, None),
    "gpt3": (20_000_000, 11_590_004, 24 * 24_576, 2.6897, "1207959552"),  # in tokens
    "openfold": (594_595, 180, 40 * 128, 0.8001, None),
}
"""Training and evaluation samples, progress and score of the only evaluation, and its epoch in the log."""


@pytest.mark.parametrize(
    ("benchmark", "ruleset"),
    [
        ("dlrm", "1.0.0"), ("dlrm", "2.1.0"), ("dlrm_dcnv2", "3.0.0"), ("dlrm_dcnv2", "4.1.0"), ("dlrm_dcnv2", "6.0.0"),
        ("retinanet", "4.1.0"), ("retinanet", "5.1.0"), ("rgat", "4.1.0"), ("rgat", "5.1.0"), ("cosmoflow", "1.0.0"),
        ("cosmoflow", "3.0.0"), ("deepcam", "1.0.0"), ("deepcam", "3.0.0"), ("oc20", "1.0.0"), ("oc20", "3.0.0"),
        ("gpt3", "3.0.0"), ("gpt3", "4.1.0"),
        ("openfold", "3.0.0"),
    ],
)  # fmt: skip
def test_the_official_checker_accepts_the_log_of_a_run(benchmark, ruleset, tmp_path):
    train, evaluation, done, score, epoch = RUNS[benchmark]
    run, session = loaded(benchmark, tmp_path, f"ruleset={ruleset}", "submission.org=acme")
    admission, began = admit(run, session), time.time_ns() // 1_000_000
    rules, block = admission.rules, Block(0, 1, 0, 0, train if epoch is None else done)
    with RunLog(tmp_path / "mlperf.log", 0) as log:
        if rules.unit == "tokens":
            converted = {"sample_tokens": run.declaration.sample_tokens}
        else:
            converted = {"fraction_of": None if epoch is None else train, "fractions_from": rules.fractions_from}
        events = RunEvents(log, rules.progress_key, quality_key=rules.quality_key, **converted)
        events.begin(run, session, rules, None, began, gpus=True)
        events.settings(7, admission.hyperparameters, {}, run.declaration.initialised_tensors)
        events.initialised()
        events.run_start()
        events.data_opened(train, evaluation)
        events.block_start(block, 0)
        events.block_stop(block, done, 2400.0)
        events.eval_start(done)
        events.accuracy({"metric": score}, done, time.time_ns() // 1_000_000)
        events.eval_stop(done)
        events.run_stop("success", done, None)
    if epoch is not None:
        assert log.path.read_text().count(f'"epoch_num": {epoch}') == 5  # tracked_stats and run_stop too
    command = [sys.executable, "-m", "mlperf_logging.compliance_checker", "--usage", rules.usage, "--ruleset", ruleset]
    files = [str(log.path), "--log_output", str(tmp_path / "checked")]
    checked = subprocess.run([*command, *files], capture_output=True, check=False)
    assert checked.returncode == 0, checked.stdout
