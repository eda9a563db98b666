"""Profile a window of steps with torch.profiler: one Chrome trace and one table per rank."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from common.errors import ConfigError

FORM = re.compile(r"steps:(\d+)-(\d+)")
TABLE_ROWS = 40


class ProfileWindow:
    """Profiles the steps ``first`` to ``last``, both included.

    Args:
        output_dir: folder for ``profile_rank<r>_steps<first>-<last>.json`` (for chrome://tracing or Perfetto) and
            the table with the ending ``.txt``.
    """

    def __init__(self, first: int, last: int, output_dir: Path, rank: int) -> None:
        self._steps = range(first, last + 1)
        self._stem = f"profile_rank{rank}_steps{first}-{last}"
        self._output_dir = output_dir
        self._profiler: profile | None = None

    @classmethod
    def parse(cls, text: str | None, output_dir: Path = Path("."), rank: int = 0) -> ProfileWindow | None:
        """Return the window for a text such as ``"steps:100-110"``. None or "" stands for no window.

        Raises:
            ConfigError: the text has another form, or the window is empty.
        """
        if not text:
            return None
        match = FORM.fullmatch(text.strip())
        if match is None or int(match[1]) > int(match[2]):
            raise ConfigError(f"profile={text!r}: the form is steps:FIRST-LAST, for example steps:100-110")
        return cls(int(match[1]), int(match[2]), output_dir, rank)

    def before(self, step: int) -> None:
        """Start the profiler if ``step`` is in the window and it is not running. Call before every step."""
        if self._profiler is not None or step not in self._steps:
            return
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._profiler = profile(activities=activities, record_shapes=True)
        self._profiler.start()

    def after(self, step: int) -> list[Path]:
        """Stop the profiler after the last step of the window, and return the files that were written.

        Call this after every step.
        """
        return self.close() if step >= self._steps.stop - 1 else []

    def close(self) -> list[Path]:
        """Stop the profiler if it is running, and return the files that were written."""
        if self._profiler is None:
            return []
        profiler, self._profiler = self._profiler, None
        self._steps = range(0)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        profiler.stop()
        self._output_dir.mkdir(parents=True, exist_ok=True)
        trace, table = (self._output_dir / f"{self._stem}{ending}" for ending in (".json", ".txt"))
        profiler.export_chrome_trace(str(trace))
        order = "self_device_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
        table.write_text(profiler.key_averages().table(sort_by=order, row_limit=TABLE_ROWS) + "\n")
        return [trace, table]
