"""DLRM-DCNv2 as a workload: published recipes, what is logged, what the closed division fixes."""

from pathlib import Path

import pytest
import torch

from benchmarks.dlrm_dcnv2.workload import DlrmDcnv2
from common.data.batches import Batch
from common.distributed.layout import Layout
from common.errors import ConfigError
from common.mlperf.admission import admit, evaluation_schedule
from common.recommendation.planner import make_plan
from tests.benchmarks.recipes import recipes_of
from tests.gloo_ranks import on_ranks
from tests.shared_peers import shared_peers

SAMPLES = 4_195_197_692


loaded, built = recipes_of("dlrm_dcnv2", DlrmDcnv2)


# NVIDIA's results of MLPerf Training v4.0 and v4.1: GPUs, samples of a step on each, learning rate, loss scale, steps
# between two evaluations, samples of an evaluation batch over all GPUs, plan, bandwidth ratio, GB that are replicated.
PUBLISHED = {
    "8xH200": (8, 6912, 0.004, 16384, 3793, 1_048_576, "auto", 11, 0.008),
    "8xH100": (8, 6912, 0.004, 16384, 3793, 262_144, "auto", 7, 0.008),
    "64xH100": (64, 2112, 0.0034, 20480, 1551, 1_048_576, "hier_auto", 67, 0.0125),
    "128xH100": (128, 1056, 0.0034, 20480, 1551, 2_097_152, "hier_auto", 67, 0.0125),
}


@pytest.mark.parametrize("scale", list(PUBLISHED))
def test_a_recipe_has_the_published_settings(scale):
    gpus, samples, rate, loss_scale, interval, eval_batch, plan, ratio, replicated = PUBLISHED[scale]
    run, session = loaded(f"scale={scale}", "ruleset=5.1.0")
    own = run.workload
    assert (run.training_ranks, run.micro_batch, run.grad_accumulation_steps) == (gpus, samples, 1)
    assert (run.precision, own.model.loss_scale, gpus * own.reader.eval_batch) == ("fp16", loss_scale, eval_batch)
    found = own.embeddings
    assert (found.plan, found.bandwidth_ratio, found.work_ratio, found.replicate_below_gb, found.memory_gb) == (
        plan, ratio, 4, replicated, 60,
    )  # fmt: skip
    assert evaluation_schedule(run).first == interval * gpus * samples
    assert admit(run, session).hyperparameters == {
        "global_batch_size": gpus * samples,
        "gradient_accumulation_steps": 1,
        "opt_name": "adagrad",
        "opt_base_learning_rate": rate,
        "opt_adagrad_epsilon": 1e-8,
        "opt_adagrad_initial_accumulator_value": 0.0,
        "opt_adagrad_learning_rate_decay": 0.0,
        "opt_weight_decay": 0.0,
        "opt_learning_rate_warmup_steps": 0,
        "opt_learning_rate_decay_start_step": 0,
        "opt_learning_rate_decay_steps": 0,
    }


@pytest.mark.parametrize("gpus", [2, 4])
def test_fewer_gpus_accumulate_to_the_batch_of_eight(gpus):
    run, session = loaded(f"scale={gpus}xH200")
    admit(run, session)
    assert (run.micro_batch, run.grad_accumulation_steps, run.global_batch) == (6912, 8 // gpus, 55296)
    rows = sum(run.workload.facts.table_rows)
    assert rows == 204_184_588
    memory_gb = run.workload.embeddings.memory_gb
    resident = 912 * 89_137_319 / gpus / 1e9
    kept = resident if run.workload.reader.resident_gb >= resident else 0.0
    assert rows * 1024 / gpus / 1e9 < memory_gb
    assert rows * 1024 / gpus / 1e9 + kept < 120


@pytest.mark.parametrize(
    ("scale", "cap", "rows", "gb"), [("1xH200", 5_000_000, 29_184_588, 30), ("1xGPU", 1_000_000, 7_116_632, 8)]
)
def test_capped_tables_fit_one_gpu_and_are_no_result_of_the_closed_division(scale, cap, rows, gb):
    run, session = loaded(f"scale={scale}")
    whole = loaded("scale=8xH200")[0].workload.facts
    facts = run.workload.facts
    assert facts.table_rows == tuple(min(rows, cap) for rows in whole.table_rows)
    assert facts.hotness == whole.hotness
    assert sum(facts.table_rows) == rows
    assert rows * 1024 / 1e9 < gb
    admit(run, session)
    with pytest.raises(ConfigError, match="table_rows"):
        admit(*loaded(f"scale={scale}", "submission.division=closed"))


@pytest.mark.parametrize("scale", ["1xGPU", "1xH200", "2xH200", "4xH200", *PUBLISHED])
def test_the_tables_of_a_recipe_have_a_plan_within_its_memory(scale):
    run, _ = loaded(f"scale={scale}")
    own, ranks = run.workload, run.training_ranks
    tables, settings = own.facts.tables, own.embeddings
    plan = make_plan(tables, settings.plan, ranks, run.scale.gpus_per_node, 1024, settings)
    plan.check_memory(1024, int(settings.memory_gb * 1e9))
    held = sum(plan.rows_of(rank) for rank in range(ranks))
    replicated = sum(tables.tables[table].rows for table in plan.replicated)
    assert held == tables.rows + (ranks - 1) * replicated


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("benchmark.facts.hotness=[1,2]", r"benchmark\.facts\.hotness: 2 tables"),
        ("benchmark.facts.bottom_mlp=[512,64]", r"benchmark\.facts\.bottom_mlp"),
        ("hparams.epsilon=0", r"hparams\.epsilon"),
        ("reader.eval_batch=0", r"reader\.eval_batch"),
        ("embeddings.memory_gb=0", r"embeddings\.memory_gb"),
    ],
)
def test_what_cannot_be_is_named(override, message):
    with pytest.raises(ConfigError, match=message):
        loaded("scale=8xH200", override)


def test_ranks_that_only_evaluate_have_no_tables():
    run, _ = loaded("scale=test", "scale.gpus_per_node=2", "evaluation.ranks=1")
    with pytest.raises(ConfigError, match=r"evaluation\.ranks=1: DLRM-DCNv2's tables lie on the ranks that train"):
        DlrmDcnv2(run, Layout(run.layout))


def test_the_loss_at_the_beginning_is_that_of_a_coin():
    workload = built()
    (example,) = workload.example_batches()
    losses = workload.loss(Batch(example.tensors, example.samples))
    assert losses.total.item() == pytest.approx(torch.tensor(2.0).log().item(), abs=0.2)  # tables of 3 rows are large
    workload.close()


def exchanged(rank: int, world: int, folder: str) -> dict[str, tuple[list[float], str]]:
    """Return the losses of three steps, and the plan of the memory, of both ways to exchange."""
    found = {}
    for exchange in ("collectives", "peer_memory"):
        run, _ = loaded("scale=test", f"scale.gpus_per_node={world}", f"embeddings.exchange={exchange}")
        with shared_peers(Path(folder)):
            workload = DlrmDcnv2(run, Layout(run.layout, rank, seed=1))
        step = workload.build_step()
        batches = list(workload.example_batches()) * run.grad_accumulation_steps
        results = [step(batches) for _ in range(3)]
        losses = [step.read(result.names, result.values.tolist()).metrics["loss"] for result in results]
        found[exchange] = losses, workload.memory_plan()
        workload.close()
    return found


def test_both_exchanges_train_alike_and_the_plan_names_the_memory_of_peers(tmp_path):
    for rank in on_ranks(exchanged, 2, tmp_path / "ranks"):
        (expected, plain), (found, with_peers) = rank["collectives"], rank["peer_memory"]
        assert expected[0] != expected[2]
        assert found == expected
        (added,) = set(with_peers.splitlines()) - set(plain.splitlines())
        assert added.startswith("mapped by other ranks: ")
