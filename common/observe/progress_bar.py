"""Show the progress of training on a terminal or in a log file."""

from __future__ import annotations

import sys
import time

from tqdm import tqdm

BAR_FORMAT = (
    "{desc} {percentage:3.0f}%|{bar:24}| {n_fmt}/{total_fmt} samples, {rate_fmt}{postfix}, evaluation in {remaining}"
)


LINE_SECONDS = 5.0
"""Shortest time between two lines in a stream that is not a terminal."""


class ProgressBar:
    """Prints the progress of training on rank 0: as a bar on a terminal, otherwise as a line every few seconds."""

    def __init__(self, rank: int) -> None:
        self._active = rank == 0
        self._stream = sys.stderr
        self._bar: tqdm | None = None
        self._label = ""
        self._total = self._done = 0
        self._loss: float | None = None
        self._started = self._printed = time.monotonic()

    def block(self, index: int, total_samples: int, label: str) -> None:
        """Begin a block, which is the training up to the next evaluation.

        Args:
            index: number of the block, from 0.
            total_samples: nominal samples of the block, over all ranks; 0 if they are unknown.
            label: text after the number; may be empty.
        """
        if not self._active:
            return
        self._close_block()
        self._label = f"block {index + 1}" + (f", {label}" if label else "")
        self._total, self._done, self._loss = total_samples, 0, None
        self._started = self._printed = time.monotonic()
        if self._stream.isatty():
            self._bar = tqdm(
                total=total_samples or None,
                desc=self._label,
                unit=" samples",
                unit_scale=True,
                bar_format=BAR_FORMAT,
                file=self._stream,
                leave=False,
                dynamic_ncols=True,
                smoothing=0.1,
            )

    def update(self, samples: int, loss: float | None = None) -> None:
        """Add the ``samples`` trained since the last call over all ranks, and the latest loss if it is known."""
        if not self._active:
            return
        # The last batch of a block may have padding, which counts as samples: do not exceed the total.
        samples = min(samples, self._total - self._done) if self._total else samples
        self._done += samples
        if loss is not None:
            self._loss = loss
        if self._bar is not None:
            if loss is not None:
                self._bar.set_postfix_str(f"loss {loss:.4g}", refresh=False)
            self._bar.update(samples)
        elif time.monotonic() - self._printed >= LINE_SECONDS:
            self._print_line()

    def line(self, text: str) -> None:
        """Print a line, above the bar if there is one."""
        if not self._active:
            return
        if self._bar is not None:
            self._bar.clear()
        self._write(text)
        if self._bar is not None:
            self._bar.refresh()

    def clear(self) -> None:
        """Remove the bar from the screen before other output. The next update draws it again."""
        if self._bar is not None:
            self._bar.clear()

    def close(self) -> None:
        """End the last block and print its last line."""
        if self._active:
            self._close_block()

    def _close_block(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
        if self._done:
            self._print_line()
        self._total = self._done = 0

    def _print_line(self) -> None:
        self._printed = time.monotonic()
        elapsed = self._printed - self._started
        rate = self._done / elapsed if elapsed > 0 else 0.0
        total = f"/{self._total:,}" if self._total else ""
        parts = [f"{self._label}: {self._done:,}{total} samples", f"{_rate(rate)} samples/s"]
        if self._loss is not None:
            parts.append(f"loss {self._loss:.4g}")
        if 0 < self._done < self._total and rate > 0:
            parts.append(f"evaluation in {_duration((self._total - self._done) / rate)}")
        self._write(", ".join(parts))

    def _write(self, text: str) -> None:
        self._stream.write(f"{text}\n")
        self._stream.flush()


def _rate(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
