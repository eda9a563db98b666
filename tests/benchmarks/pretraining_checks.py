"""Checks of GPT-3 and Llama 3.1, and their data in small.

``built(*overrides)`` builds the workload of the ``test`` recipe on one rank; its micro-batches have 2 rows.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from common.contract.evaluation import Predictions
from common.data.batches import Batch, Block, HostBatch
from common.data.commands import DataCommands
from common.distributed.layout import Layout
from common.language.fp8_products import Fp8TrainedProduct
from common.step.graphs import StepRunner
from tests.benchmarks.summed_gradients import Build, drawn
from tests.played_graphs import PlayedGraphs


def prepared(commands: DataCommands, folder: Path, vocabulary: int) -> Path:
    """Prepare 300 synthetic rows of 32 tokens for training and 10 for evaluation; return the data folder."""
    sizes = ["--train", "300", "--eval", "10", "--row-length", "32", "--vocabulary", str(vocabulary)]
    commands.run("generate", ["--raw-dir", str(folder / "raw"), *sizes])
    commands.run("prepare", ["--raw-dir", str(folder / "raw"), "--data-dir", str(folder / "data"), "--workers", "1"])
    return folder / "data"


def layout(replicas: int = 1, replica: int = 0) -> Layout:
    return Layout({"dp": replicas}, rank=replica, seed=11)


def rows(source: Any, block: Block = Block(0, 1, 0, 0, 64), start: int = 0) -> list[Tensor]:  # noqa: B008
    """Return the tokens of all micro-batches of ``block``, and close the source."""
    try:
        return [batch.tensors["tokens"] for batch in source.batches(block, start)]
    finally:
        source.close()


class Rows(list[HostBatch]):
    """An evaluation set in memory."""

    eval_samples = 3

    def close(self) -> None:
        """Do nothing."""


def evaluate_three_rows(workload: Any, last_label: bool) -> tuple[Tensor, Predictions, dict[str, float]]:
    """Evaluate three rows in batches of two; the second row has four labels.

    Args:
        last_label: whether the last token of the other rows is a label.

    Returns:
        The rows, the predictions and the scores.
    """
    evaluation = workload.evaluation(workload.layout)
    shape = (4, workload.own.facts.row_length + 1)
    tokens = torch.randint(200, shape, generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    if not last_label:
        tokens[:, -1] = -1
    tokens[1, 5:] = -1
    tokens[3] = -1  # fills the batch up
    present = torch.tensor([True, True, True, False])
    batches = Rows(
        HostBatch({"tokens": t, "present": p}, 2, 0) for t, p in zip(tokens.split(2), present.split(2), strict=True)
    )
    evaluation._open_source = lambda root: batches
    evaluation.open_data(None)
    predictions = evaluation.predict(workload.weights())
    assert predictions is not None
    return tokens[:3], predictions, evaluation.scorer.score(predictions)


def check_ten_updates(ours: Any, theirs: Any, adamw: torch.optim.AdamW, rate_of: Callable[[int], float]) -> None:
    """Check that ten steps of ``ours`` equal those of PyTorch, with gradients clipped to a norm of 1.

    Args:
        theirs: the same workload under autograd.
        adamw: optimizer of the parameters of ``theirs``.
        rate_of: learning rate by the number of updates before.
    """
    step, (batch,) = ours.build_step(), theirs.example_batches()
    for number in range(10):
        step([batch])
        adamw.zero_grad()
        theirs.loss(batch).total.backward()
        torch.nn.utils.clip_grad_norm_(theirs.model.parameters(), 1.0)
        for group in adamw.param_groups:
            group["lr"] = float(torch.tensor(rate_of(number), dtype=torch.float32))
        adamw.step()
    for (name, found), expected in zip(ours.model.named_parameters(), theirs.model.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7, msg=name)


def check_that_every_micro_batch_counts(built: Build) -> None:
    """Check that the loss of a step is the mean of two different micro-batches."""
    workload = built("precision=fp64")
    step, (batch,) = workload.build_step(), workload.example_batches()
    tokens = batch.tensors["tokens"]
    other = Batch({"tokens": torch.cat([tokens[:, :-1].flip(0, 1), tokens[:, -1:]], dim=1)}, batch.samples)
    result = step([batch, other])
    found = step.read(result.names, result.values.tolist()).metrics["loss"]
    fresh = built("precision=fp64")
    first, second = (float(fresh.loss(each).total.detach()) for each in (batch, other))
    assert abs(first - second) > 1e-3
    assert found == pytest.approx((first + second) / 2, rel=1e-6)


def check_that_fp8_trains_as_bf16(built: Build) -> None:
    """Check twenty steps of two small networks on rows that repeat; the real comparison runs on a GPU."""
    losses = {}
    for linear in ("torch", "fp8"):
        workload = built("precision=bf16", f"model.linear={linear}", "hparams.global_batch_size=2")
        step, (batch,) = workload.build_step(), workload.example_batches()
        results = [step([batch]) for _ in range(20)]
        losses[linear] = [step.read(r.names, r.values.tolist()).metrics["loss"] for r in results]
    assert losses["torch"][-1] < 0.8 * losses["torch"][0]
    assert losses["fp8"] == pytest.approx(losses["torch"], rel=0.03)


def check_that_graphs_train_as_eager_passes(built: Build, given: tuple[str, ...], casts_per_step: int) -> None:
    """Check three steps of several micro-batches bit for bit; graphs must not contain casts of weights.

    Args:
        given: overrides.
        casts_per_step: casts of weights to FP8.
    """
    trained = {}
    for graphs in ("false", "chunks"):
        workload = built(*given, f"cuda_graphs={graphs}")
        step, played = workload.build_step(), PlayedGraphs(workload.model, *workload.stage.parts)
        count, (example,) = workload.cfg.grad_accumulation_steps, workload.example_batches()
        assert count > 1
        cast, casts = Fp8TrainedProduct._cast_weight, []

        def noted(product: Fp8TrainedProduct, cast: Any = cast, casts: Any = casts, played: Any = played) -> None:
            casts.append(played.busy)
            cast(product)

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(Fp8TrainedProduct, "_cast_weight", noted)
            runner = StepRunner(step, workload.model, count, recorder=played)
            runner.warm_up(workload.example_batches())
            casts_before = len(casts)
            results = [
                runner([drawn(example, count * number + index) for index in range(count)]).values.tolist()
                for number in range(3)
            ]
        assert (played.replays > 0) == (graphs == "chunks")
        assert not any(casts)
        assert len(casts) - casts_before == 3 * casts_per_step
        trained[graphs] = results, workload.named_state()
    (eager, wanted), (replayed, found) = trained.values()
    assert replayed == eager
    for (name, tensor), (_, other) in zip(wanted, found, strict=True):
        assert torch.equal(tensor, other), name
