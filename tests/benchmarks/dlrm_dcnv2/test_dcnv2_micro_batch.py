"""``micro_batch=auto`` where no device holds the tables."""

from __future__ import annotations

from benchmarks.dlrm.workload import Dlrm
from benchmarks.dlrm_dcnv2.workload import DlrmDcnv2
from common import cli
from common.config.composition import compose
from common.config.schema import RunConfig
from common.distributed.layout import Layout


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


def test_rows_without_a_state_take_half():
    run = loaded("dlrm", "scale=8xA100", "embeddings.plan=row_wise")
    rows = sum(-(-rows // 8) for rows in run.workload.facts.table_rows)
    assert Dlrm.unprobed_bytes(run) == rows * 128 * 4
