"""Which rank a failed Slurm step names; the lines are srun's own (Slurm 22.05 and 23.11)."""

import pytest

from common.launch.step_errors import complaint, explain


def test_a_killed_rank_is_named_before_those_that_lost_it():
    lines = [
        "srun: error: n1: tasks 0-1: Exited with exit code 9",
        "srun: error: n2: task 3: Killed",
        "srun: Terminating StepId=4.0",
    ]
    assert explain(lines) == (
        "rank 3 on n2 was ended by a signal (Killed); the kernel may have run out of memory (see dmesg)"
    )


def test_a_rank_that_printed_a_message_gets_no_other():
    assert explain(["srun: error: n1: task 0: Exited with exit code 7", "srun: error: n2: task 2: Killed"]) is None


def test_several_ranks_are_named_together():
    assert explain(["srun: error: gpu07: tasks 8-15: Aborted (core dumped)"]) == (
        "ranks 8-15 on gpu07 were ended by a signal (Aborted (core dumped))"
    )


def test_an_unknown_exit_code_is_named():
    assert explain(["srun: error: n1: task 1: Exited with exit code 77"]) == "rank 1 on n1 ended with exit code 77"


def test_ranks_that_only_lost_a_connection_are_reported():
    text = explain(["srun: error: n1: task 1: Exited with exit code 9"])
    assert text is not None
    assert "no message names" in text


@pytest.mark.parametrize("lines", [[], ["srun: job 3 queued and waiting for resources", "anything else"]])
def test_a_step_without_failed_tasks_has_no_message(lines):
    assert explain(lines) is None


def test_errors_of_srun_itself_are_found_among_other_lines():
    remarks = ["srun: job 3 queued and waiting for resources", "srun: error: n2: task 3: Killed"]
    assert complaint(remarks) is None
    refusal = "Unable to create step for job 3: Requested node configuration is not available"
    assert complaint([*remarks, f"srun: error: {refusal}"]) == f"srun: {refusal}"
