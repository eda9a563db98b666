"""``bench`` measures step and run of any recipe, and extends the run to the evaluations of the recipe's own batch."""

from __future__ import annotations

import re

import pytest

from common import cli


def bench(capsys: pytest.CaptureFixture[str], *overrides: str) -> str:
    """What a short measurement of BERT's test recipe prints."""
    few = ["bench.steps=1", "bench.warmup_steps=0"]
    capsys.readouterr()
    assert cli.run(["bench", "benchmark=bert", "scale=test", "device=cpu", *few, *overrides]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("steps", [4, 8])
def test_a_run_of_one_block_is_measured_as_well_as_a_run_of_two(data_of, capsys, steps):
    # 16 samples a step and 64 between evaluations: one block, or two.
    said = bench(capsys, f"data_dir={data_of('bert')}", f"hparams.training_steps={steps}")
    assert re.search(r"^run: with evaluations +[\d.,]+ samples/s, [\d.]+ of the step$", said, re.MULTILINE)


def test_names_and_values_are_two_columns(capsys):
    said = bench(capsys, "bench.data=false")
    values = {re.match(r"\S+(?: \S+)* {2,}", line).end() for line in said.splitlines()}
    assert len(values) == 1


def test_without_data_the_step_alone_is_measured(tmp_path, capsys):
    said = bench(capsys, f"data_dir={tmp_path / 'none'}")
    assert re.search(r"^step +[\d.]+ ms, \d+ samples/s", said, re.MULTILINE)
    assert f"not measured: there are no prepared data in {tmp_path / 'none'}" in said
