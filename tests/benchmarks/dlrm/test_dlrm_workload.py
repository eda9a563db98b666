"""DLRM as a workload: published recipes, what is logged, the learning rate, what the closed division fixes."""

from __future__ import annotations

import pytest
import torch

from benchmarks.dlrm.workload import Dlrm
from common import cli
from common.config.composition import compose
from common.config.schema import RunConfig, SessionConfig
from common.distributed.layout import Layout
from common.errors import ConfigError
from common.mlperf.admission import admit, evaluation_schedule

SAMPLES = 4_195_197_692


def loaded(*overrides: str) -> tuple[RunConfig, SessionConfig]:
    return cli.load(compose(["benchmark=dlrm", "device=cpu", *overrides]))


# NVIDIA's results of MLPerf Training v2.0: GPUs, samples of a step on each, rate, warm-up, start and length of the
# decay, steps between two evaluations.
PUBLISHED = {
    "8xA100": (8, 6912, 24.0, 2750, 49315, 27772, 3793),
    "112xA100": (112, 640, 26.0, 2500, 46821, 15406, 2926),
}


@pytest.mark.parametrize("scale", list(PUBLISHED))
def test_a_recipe_has_the_published_settings(scale):
    gpus, samples, rate, warmup, start, length, interval = PUBLISHED[scale]
    run, session = loaded(f"scale={scale}")
    assert (run.training_ranks, run.micro_batch, run.grad_accumulation_steps) == (gpus, samples, 1)
    assert (run.precision, run.workload.model.loss_scale) == ("fp16", 1024)
    assert evaluation_schedule(run).first == interval * gpus * samples
    assert admit(run, session).hyperparameters == {
        "global_batch_size": gpus * samples,
        "gradient_accumulation_steps": 1,
        "opt_base_learning_rate": rate,
        "opt_learning_rate_warmup_steps": warmup,
        "lr_decay_start_steps": start,
        "sgd_opt_base_learning_rate": rate,
        "sgd_opt_learning_rate_decay_poly_power": 2,
        "sgd_opt_learning_rate_decay_steps": length,
    }


def test_capped_tables_fit_one_gpu_and_are_no_result_of_the_closed_division():
    run, session = loaded("scale=1xH200")
    whole = loaded("scale=8xA100")[0].workload.facts
    facts = run.workload.facts
    assert sum(whole.table_rows) == 187_767_399
    assert facts.table_rows == tuple(min(rows, 5_000_000) for rows in whole.table_rows)
    admit(run, session)
    with pytest.raises(ConfigError, match="table_rows"):
        admit(*loaded("scale=1xH200", "submission.division=closed"))


def test_dense_weights_and_rows_have_the_published_rate():
    run, _ = loaded("scale=test", "hparams.warmup_steps=4", "hparams.decay_start_steps=6", "hparams.decay_steps=3")
    workload = Dlrm(run, Layout(run.layout))
    step = workload.build_step()
    batches = [next(iter(workload.example_batches()))] * run.grad_accumulation_steps
    found = []
    for _ in range(10):
        result = step(batches)
        found.append(step.read(result.names, result.values.tolist()).metrics["learning_rate"])
    base = run.workload.hparams.base_learning_rate
    shares = [1 / 4, 2 / 4, 3 / 4, 3 / 4, 3 / 4, 1.0, (2 / 3) ** 2, (1 / 3) ** 2, (1 / 3) ** 2, (1 / 3) ** 2]
    assert found == pytest.approx([share * base for share in shares])
    workload.close()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("hparams.decay_start_steps=10", r"hparams\.decay_start_steps=10: not before the end of warmup_steps=2750"),
        ("benchmark.facts.table_rows=[3,4]", r"benchmark\.facts\.table_rows: 2 tables"),
    ],
)
def test_what_cannot_be_is_named(override, message):
    with pytest.raises(ConfigError, match=message):
        loaded("scale=8xA100", override)


def test_the_loss_at_the_beginning_is_finite_and_near_that_of_a_coin():
    run, _ = loaded("scale=test")
    workload = Dlrm(run, Layout(run.layout, seed=3))
    with torch.no_grad():
        workload.model.top_l[-1].bias.zero_()  # its standard deviation is 1: one draw shifts all logits
    (example,) = workload.example_batches()
    assert workload.loss(example).total.item() == pytest.approx(torch.tensor(2.0).log().item(), abs=0.3)
    workload.close()
