"""Whether the numbers of a log agree with each other: counts, blocks, evaluations and the rules' data set."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from itertools import pairwise

from common.mlperf.data_sets import wrong_size
from common.mlperf.parsed_log import Event, ParsedLog
from common.mlperf.progress import Blocks, blocks_of, evaluations_of, is_number
from common.mlperf.rules import Rules

COUNTS = (
    "global_batch_size",
    "gradient_accumulation_steps",
    "train_samples",
    "eval_samples",
    "number_of_nodes",
    "accelerators_per_node",
)
"""Keys whose values count something."""

COUNTING_METADATA = ("samples_count", "step_num")
"""Metadata that count something. Epochs may be parts of one."""

MOST = 2**53
"""More than any data set has, and what all readers of JSON agree on."""
_MAY_BE_ZERO = ("accelerators_per_node", "train_samples")


def wrong_counts(log: ParsedLog) -> list[str]:
    """Values that count something and are no whole number of it, in sentences that name the line."""
    return [text for event in log.events for text in _wrong_counts(event)]


def _wrong_counts(event: Event) -> Iterator[str]:
    if event.key in COUNTS:
        lowest = 0 if event.key in _MAY_BE_ZERO else 1
        if (wrong := _not_a_count(event.value, lowest)) is not None:
            yield f"line {event.line}: {event.key} {wrong}"
    if event.key.startswith(("block_", "epoch_", "eval_", "run_")):
        for name in COUNTING_METADATA:
            if name in event.metadata and (wrong := _not_a_count(event.metadata[name], 0)) is not None:
                yield f"line {event.line}: {name} of {event.key} {wrong}"


def _not_a_count(value: object, lowest: int) -> str | None:
    """Why a value is no count; None if it is one."""
    if value is None:
        return "is null: it is not said"
    if isinstance(value, str):
        return f"is text, {json.dumps(value)[:80]}: write a number"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return f"is {json.dumps(value)[:80]}, not a number"
    if not math.isfinite(value) or value != int(value):
        return f"is {value!r}, not a whole number"
    if value > MOST:
        return f"is {value!r}, more than anything has"
    return None if value >= lowest else f"is {value!r}, less than {lowest}"


def wrong_sizes(log: ParsedLog, rules: Rules) -> list[str]:
    """Sizes of the data sets that are not the rules', in sentences that name the line."""
    batch = log.global_batch
    if not is_number(batch) or batch < 1:
        return []
    found = []
    for key in ("train_samples", "eval_samples"):
        for event in log.all(key)[:1]:
            if is_number(event.value) and (wrong := wrong_size(key, int(event.value), int(batch), rules)):
                found.append(f"line {event.line}: {wrong}")
    return found


def disagreeing_progress(log: ParsedLog, rules: Rules) -> list[str]:
    """Evaluations where no block ends, blocks that leave training out, and a run that does not begin at its start."""
    blocks = blocks_of(log, rules)
    complaints = [] if rules.unit == "epoch fraction" else list(_late_begin(log, blocks))
    if blocks is None or complaints:
        return complaints
    for before, after in pairwise(blocks.blocks):
        if after.start is not None and abs(after.begin - before.end) > blocks.tolerance:
            complaints.append(
                f"line {after.start.line}: the block begins after {after.begin:.10g}, the one before ends after "
                f"{before.end:.10g}: training is missing"
            )
            break
    off = [e for e in evaluations_of(log, rules) if math.isfinite(e.progress) and blocks.misses(e.progress)]
    if off:
        listed = ", ".join(f"{block.end:.10g}" for block in blocks.blocks[:8])
        complaints.append(
            f"line {off[0].line}: an evaluation after {rules.progress_key} {off[0].progress:.10g} is where no block "
            f"ends: they end after {listed}" + (", ..." if len(blocks.blocks) > 8 else "")
        )
    return complaints


def _late_begin(log: ParsedLog, blocks: Blocks | None) -> Iterator[str]:
    """What shows that the first block of a log is not the run's first."""
    starts, stops = log.all("block_start"), log.all("block_stop")
    if not starts or (stops and stops[0].line < starts[0].line):  # some log no start of the first block
        return
    where, metadata = f"line {starts[0].line}: the first block begins", starts[0].metadata
    first, count = metadata.get("first_epoch_num"), metadata.get("epoch_count")
    if is_number(first) and is_number(count) and first > max(1, count):
        yield f"{where} with first_epoch_num {first!r}: the training before it is missing"
    elif blocks is not None and blocks.blocks[0].begin > blocks.tolerance:
        yield f"{where} after {blocks.blocks[0].begin:.10g}: the training before it is missing"
