"""Steps and files of a profile window, and texts that are refused."""

import json

import pytest
import torch

from common.errors import ConfigError
from common.observe.profile import ProfileWindow


@pytest.mark.parametrize("text", [None, ""])
def test_no_text_profiles_nothing(text):
    assert ProfileWindow.parse(text) is None


@pytest.mark.parametrize("text", ["100-110", "steps:110-100", "steps:1", "steps:a-b", "epochs:1-2"])
def test_bad_texts_name_the_form(text):
    with pytest.raises(ConfigError, match="steps:FIRST-LAST"):
        ProfileWindow.parse(text)


def test_the_window_holds_its_steps_and_only_those(tmp_path):
    window = ProfileWindow.parse("steps:2-3", tmp_path, rank=1)
    files = []
    for step in range(6):
        window.before(step)
        with torch.profiler.record_function(f"step number {step}"):
            torch.ones(2) + 1
        files += window.after(step)
    assert [path.name for path in files] == ["profile_rank1_steps2-3.json", "profile_rank1_steps2-3.txt"]
    names = {event.get("name") for event in json.loads(files[0].read_text())["traceEvents"]}
    assert {name for name in names if name and name.startswith("step number")} == {"step number 2", "step number 3"}
    assert "aten::add" in files[1].read_text()


def test_a_run_that_ends_inside_the_window_writes_its_files(tmp_path):
    window = ProfileWindow.parse("steps:0-100", tmp_path)
    window.before(0)
    window.after(0)
    assert len(window.close()) == 2
    assert window.close() == []
