"""``micro_batch=auto`` where no device holds the tables."""

from __future__ import annotations

import pytest

from benchmarks.dlrm.workload import Dlrm
from benchmarks.dlrm_dcnv2.workload import DlrmDcnv2
from common import cli
from common.config.composition import compose
from common.config.schema import RunConfig
from common.distributed.layout import Layout
from common.step.graphs import StepRunner


def loaded(benchmark: str, *overrides: str) -> RunConfig:
    return cli.load(compose([f"benchmark={benchmark}", "device=cpu", *overrides]))[0]


def test_a_probe_has_short_tables_on_one_rank_and_the_rest_is_known():
    run = loaded("dlrm_dcnv2", "scale=8xH200", "micro_batch=2", "embeddings.plan=row_wise")
    probe = DlrmDcnv2.probe(run, Layout())
    batch = next(iter(probe.example_batches()))
    assert batch.tensors["ids"].shape == (2, 214)
    assert 0 <= int(batch.tensors["ids"].min()) <= int(batch.tensors["ids"].max()) < 4096
    rows = sum(-(-rows // 8) for rows in run.workload.facts.table_rows)
    assert DlrmDcnv2.unprobed_bytes(run) == rows * 128 * 8  # fp32 rows and their state
    assert run.declaration.largest_micro_batch == 55_296


@pytest.mark.parametrize(("benchmark", "workload_type"), [("dlrm", Dlrm), ("dlrm_dcnv2", DlrmDcnv2)])
def test_a_probe_trains_one_micro_batch_however_many_are_accumulated(benchmark, workload_type):
    run = loaded(benchmark, "scale=test", "micro_batch=2")
    assert run.grad_accumulation_steps > 1
    probe = workload_type.probe(run, Layout())
    StepRunner(probe.build_step(), probe.model, 1, capture=False).warm_up(probe.example_batches())


def test_rows_without_a_state_take_half():
    run = loaded("dlrm", "scale=8xA100", "embeddings.plan=row_wise")
    rows = sum(-(-rows // 8) for rows in run.workload.facts.table_rows)
    assert Dlrm.unprobed_bytes(run) == rows * 128 * 4
