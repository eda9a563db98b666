"""The bench of file reads prints a rate for each way, and says what it cannot do."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from common.data.direct_reader_bench import main
from common.errors import DataError


def test_every_way_has_a_rate_or_a_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "data").write_bytes(bytes(3 << 20))
    assert main(["--path", str(tmp_path / "data"), "--piece-mb", "1", "--rounds", "2", "--gb", "0.002"]) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert first.startswith("0.00 GB of ")
    assert [line.split()[0] for line in lines] == ["direct", "buffered", "cached"] * 2
    for line in lines:
        assert re.search(r" +\d+\.\d\d GB/s +\d+\.\d{3} s$", line) or (line[0] == "d" and "O_DIRECT" in line)


def test_a_file_that_cannot_be_read_is_one_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").touch()
    for name, message in {"nothing": "No such file", "empty": "is empty"}.items():
        assert main(["--path", str(tmp_path / name)]) == DataError.exit_code
        assert message in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_a_gpu_that_is_not_there_is_missed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--path", str(tmp_path), "--device", "cuda"])
    assert "needs a GPU" in capsys.readouterr().err
