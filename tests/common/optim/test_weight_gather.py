"""Test which gathers a block of the model waits for; one rank simulates two."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from common.optim.buffers import build_flat_buffers
from common.optim.communication import WeightGatherer


class Work:
    """A gather that logs when it is waited for."""

    def __init__(self, size: int, log: list[str]) -> None:
        self._size, self._log = size, log

    def wait(self) -> None:
        self._log.append(f"wait {self._size}")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    calls: list[str] = []

    def gather(whole: Tensor, piece: Tensor, group: object, async_op: bool) -> Work:
        assert whole.numel() == 2 * piece.numel()
        calls.append(f"gather {whole.numel()}")
        return Work(whole.numel(), calls)

    monkeypatch.setattr(dist, "all_gather_into_tensor", gather)
    return calls


class Model(nn.Module):
    """Weights of different sizes, so that the size identifies the bucket."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16, bias=False), nn.Linear(16, 32, bias=False)
        self.third = nn.Linear(32, 32, bias=False)
        self.gain = nn.Parameter(torch.ones(10))

    def forward(self, x_BC: Tensor) -> Tensor:
        return self.third(self.second(self.first(x_BC)))


FIRST, SECOND, THIRD, GAIN = 256, 512, 1024, 128  # elements of their buckets, padded to two pieces


def gatherer(model: Model, blocks: list[tuple[str, nn.Module]], bucket_bytes: int = 1) -> WeightGatherer:
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    buffers = build_flat_buffers([trained], ranks=2, bucket_bytes=bucket_bytes)
    return WeightGatherer(buffers, object(), blocks)


def blocks_of(model: Model) -> list[tuple[str, nn.Module]]:
    return [("first", model.first), ("second", model.second), ("third", model.third)]


def begun(log: list[str]) -> tuple[Model, WeightGatherer]:
    """Return a model whose step has begun, and clear the log."""
    model = Model()
    ours = gatherer(model, blocks_of(model))
    ours.begin()
    log.clear()
    return model, ours


def test_gathers_start_in_the_order_of_the_blocks_and_what_lies_in_none_comes_first(log):
    model = Model()
    gatherer(model, blocks_of(model)).begin()
    model(torch.ones(1, 16))
    assert [line for line in log if "gather" in line] == [f"gather {size}" for size in (GAIN, FIRST, SECOND, THIRD)]
    assert log[:3] == [f"gather {GAIN}", f"gather {FIRST}", f"gather {SECOND}"]
    assert log[3] == f"wait {GAIN}"


def test_a_block_starts_the_gathers_of_the_second_one_after_it_and_waits_for_its_own_once(log):
    model = Model()
    gatherer(model, blocks_of(model)).begin()
    assert f"gather {THIRD}" not in log
    log.clear()
    for _ in range(2):  # two micro-batches
        model(torch.ones(1, 16))
    assert log == [f"gather {THIRD}", f"wait {FIRST}", f"wait {SECOND}", f"wait {THIRD}"]


def test_a_block_that_runs_before_its_turn_starts_its_gathers_itself(log):
    model, _ = begun(log)
    model.third(torch.ones(1, 32))
    assert log == [f"gather {THIRD}", f"wait {THIRD}"]


def test_a_bucket_of_several_blocks_is_waited_for_by_the_first_that_runs(log):
    model = Model()
    model.gain.requires_grad_(False)
    gatherer(model, blocks_of(model), bucket_bytes=1 << 20).begin()
    whole = FIRST + SECOND + THIRD
    assert log == [f"gather {whole}"]
    model.first(torch.ones(1, 16))
    assert log == [f"gather {whole}", f"wait {whole}"]
    model(torch.ones(1, 16))
    assert log == [f"gather {whole}", f"wait {whole}"]


def test_a_bucket_with_a_weight_of_no_block_is_waited_for_at_once(log):
    model = Model()
    gatherer(model, blocks_of(model), bucket_bytes=1 << 20).begin()
    whole = -(-(GAIN // 2 + FIRST + SECOND + THIRD) // 128) * 128
    assert log == [f"gather {whole}", f"wait {whole}"]


def test_what_no_block_waited_for_is_waited_for_in_the_end(log):
    model, ours = begun(log)
    model.first(torch.ones(1, 16))
    log.clear()
    ours.join()
    assert log == [f"wait {SECOND}", f"wait {THIRD}"]
    log.clear()
    ours.join()
    assert log == []


def test_what_no_block_started_is_started_in_the_end(log):
    _, ours = begun(log)
    ours.join()
    assert log == [f"gather {THIRD}", f"wait {FIRST}", f"wait {SECOND}", f"wait {THIRD}"]


def test_what_no_block_started_may_be_started_without_waiting(log):
    _, ours = begun(log)
    ours.start_all()
    ours.start_all()
    assert log == [f"gather {THIRD}"]


def test_an_iteration_that_was_given_up_has_as_many_gathers_as_one_that_was_not(log):
    _, ours = begun(log)
    ours.begin()
    assert log[:4] == [f"gather {THIRD}", f"wait {FIRST}", f"wait {SECOND}", f"wait {THIRD}"]
    assert log[4:] == [f"gather {GAIN}", f"gather {FIRST}", f"gather {SECOND}", f"wait {GAIN}"]


def test_without_blocks_nothing_opens_an_iteration(log):
    ours = gatherer(Model(), [])
    ours.begin()
    assert log == []
    assert not ours.overlapped
    ours.gather()
    assert [line.split()[0] for line in log] == ["gather"] * 4 + ["wait"] * 4


def test_the_model_alone_waits_for_nothing(log):
    model = Model()
    gatherer(model, blocks_of(model))
    model(torch.ones(1, 16))
    assert log == []


def test_closing_removes_the_hooks(log):
    model, ours = begun(log)
    ours.close()
    model(torch.ones(1, 16))
    assert log == []


def test_a_compiled_block_waits_outside_of_what_is_compiled(log):
    model = Model()
    compiled = torch.compile(model.second, backend="eager", fullgraph=True)
    ours = gatherer(model, [("first", model.first), ("second", compiled), ("third", model.third)])
    ours.begin()
    log.clear()
    compiled(model.first(torch.ones(1, 16)))
    assert log == [f"gather {THIRD}", f"wait {FIRST}", f"wait {SECOND}"]


def test_a_block_compiled_in_place_is_refused(log):
    model = Model()
    ours = gatherer(model, blocks_of(model))
    model.second.compile(backend="eager")
    with pytest.raises(RuntimeError, match="block 'second' was compiled in place"):
        ours.begin()


def test_a_container_that_never_runs_is_no_block(log):
    model = Model()
    with pytest.raises(ValueError, match="'layers' is a ModuleList"):
        gatherer(model, [("layers", nn.ModuleList([model.first, model.second]))])
