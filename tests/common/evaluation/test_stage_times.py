"""Seconds of an evaluation's stages."""

import pytest

from common.evaluation import stage_times
from common.evaluation.stage_times import StageTimes


@pytest.fixture
def clock(monkeypatch):
    """Moments that are stamped one after another, in nanoseconds."""
    moments = iter([1_000, 4_000, 10_000, 10_500, 20_000, 21_000, 30_000, 30_007])
    monkeypatch.setattr(stage_times, "stamp", lambda moment: moment.fill_(next(moments)))


def test_stages_add_up_over_batches(clock):
    times = StageTimes(("read", "looked at", "never"))
    for stage in ("read", "looked at", "read"):
        with times(stage):
            pass
    assert times.seconds().tolist() == pytest.approx([4e-6, 0.5e-6, 0.0], rel=1e-12)
    times.clear()
    assert not times.seconds().any()
    with times("looked at"):
        pass
    assert times.seconds().tolist() == pytest.approx([0.0, 7e-9, 0.0], rel=1e-12)


def test_another_stage_is_an_error():
    with pytest.raises(KeyError), StageTimes(("read",))("written"):
        pass
