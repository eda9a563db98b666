"""The ruleset that judges a log: the one asked for, the one that the log states, or the newest that accepts it."""

from __future__ import annotations

import pytest
from handwritten_logs import POINT, TO_JULY_2025, lora_lines, resnet_lines, without

from common.errors import ConfigError
from common.mlperf.verdict import judge


def test_ruleset_that_does_not_accept_the_benchmark_refuses(write_log):
    verdict = judge(write_log(resnet_lines()), "4.1.0")
    assert verdict.kind == "refused"
    assert "does not accept resnet" in verdict.reasons[0]
    assert "v4.0" in verdict.reasons[0]


def test_older_ruleset_that_accepts_the_benchmark_judges(write_log):
    assert judge(write_log(resnet_lines()), "3.1.0").kind == "valid run"


def test_unknown_ruleset_is_an_error(write_log):
    with pytest.raises(ConfigError, match=r"9\.9\.9"):
        judge(write_log(resnet_lines()), "9.9.9")


@pytest.mark.parametrize(
    ("later", "ruleset", "decided"),
    [
        (0, None, "6.0.0"),
        (TO_JULY_2025, None, "6.0.0"),
        (TO_JULY_2025, "5.1.0", "5.1.0"),
        (TO_JULY_2025, "4.0.0", "4.0.0"),
    ],
)
def test_newest_ruleset_under_which_a_log_is_valid_decides(write_log, later, ruleset, decided):
    verdict = judge(write_log(lora_lines(later)), ruleset)
    assert (verdict.kind, verdict.ruleset) == ("valid run", decided), verdict.reasons


def test_ruleset_whose_round_was_over_is_only_named(write_log):
    """In January 2027 the round of v6.0 is over: its rules are no longer those of a run."""
    verdict = judge(write_log(lora_lines(100_000_000)))
    assert (verdict.kind, verdict.ruleset) == ("refused", "6.1.0")
    assert any("--ruleset 6.0.0" in note for note in verdict.notes), verdict.notes


def test_ruleset_that_the_log_states_decides(write_log):
    lines = [(POINT, "ruleset", "5.1.0", {}, TO_JULY_2025), *lora_lines(TO_JULY_2025)]
    assert judge(write_log(lines)).ruleset == "5.1.0"


@pytest.mark.parametrize("value", [None, ["5.1.0"], {"5.1.0": 1}, "9.9.9", 5.1])
def test_ruleset_that_is_not_valid_does_not_decide(write_log, value):
    lines = [(POINT, "ruleset", value, {}, TO_JULY_2025), *lora_lines(TO_JULY_2025)]
    assert judge(write_log(lines)).ruleset == "6.0.0"


def test_older_ruleset_that_fits_is_named(write_log):
    """Warm-up epochs of LARS were free before 1.0.0; v0.7 has no key for the steps of accumulation."""
    old = without(without(resnet_lines(), "gradient_accumulation_steps"), "submission_status")
    verdict = judge(write_log([*old, (POINT, "submission_status", "onprem", {}, 0)]))
    assert verdict.kind == "refused"
    assert any("--ruleset 0.7.0" in note for note in verdict.notes), verdict.notes
