"""Consistency of the numbers in a log: counts, blocks and evaluations, and sizes of the data sets."""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Iterator
from itertools import pairwise

from common.mlperf.parsed_log import Event, ParsedLog, evaluation_of
from common.mlperf.progress import Blocks, block_pairs, blocks_of, evaluations_of, is_finite
from common.mlperf.refusals import Refusal
from common.mlperf.rules import Rules

COUNTS = (
    "global_batch_size",
    "gradient_accumulation_steps",
    "train_samples",
    "eval_samples",
    "number_of_nodes",
    "accelerators_per_node",
)
"""Keys whose values are counts."""

UNREAD = ("train_samples", "eval_samples")
"""Counts that no checker reads as numbers, except where a rule file fixes the value. Text and null are only a note."""

COUNTING_METADATA = ("samples_count", "step_num")
"""Metadata whose values are counts. Epochs are not listed because they may be fractions."""

MOST = 2**53
"""Largest accepted count. No data set is as large, and every JSON reader represents this integer exactly."""
_MAY_BE_ZERO = ("accelerators_per_node", "train_samples")

TRAINING_EVENTS = ("block_start", "block_stop", "epoch_start", "epoch_stop")
FEW = 2
"""Smallest number of evaluations without training before them that is refused. One may be a final repetition."""
SURE_AGREEMENTS = 2
"""Evaluations that must agree with the block before them before a single disagreement counts as a contradiction."""


def wrong_counts(log: ParsedLog) -> list[Refusal]:
    """Refuse values that should be counts but are not possible whole numbers."""
    return [found for event in log.events for found in _wrong_counts(event)]


def _wrong_counts(event: Event) -> Iterator[Refusal]:
    unread = event.key in UNREAD and (event.value is None or isinstance(event.value, str))
    if event.key in COUNTS and not unread:
        lowest = 0 if event.key in _MAY_BE_ZERO else 1
        if (wrong := _not_a_count(event.value, lowest)) is not None:
            yield Refusal("count-invalid", f"line {event.line}: {event.key} {wrong}")
    if event.key.startswith(("block_", "epoch_", "eval_", "run_")):
        for name in COUNTING_METADATA:
            if name in event.metadata and (wrong := _not_a_count(event.metadata[name], 0)) is not None:
                yield Refusal("count-invalid", f"line {event.line}: {name} of {event.key} {wrong}")


def _not_a_count(value: object, lowest: int) -> str | None:
    """Return why a value is not a count; None if it is one."""
    if value is None:
        return "is null, which states nothing"
    if isinstance(value, str):
        return f"is text, {json.dumps(value)[:80]}: write a number"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return f"is {json.dumps(value)[:80]}, not a number"
    if not math.isfinite(value) or value != int(value):
        return f"is {value!r}, not a whole number"
    if value > MOST:
        return f"is {value!r}, larger than any count"
    return None if value >= lowest else f"is {value!r}, less than {lowest}"


def odd_sizes(log: ParsedLog, rules: Rules) -> list[str]:
    """Return notes on data-set sizes that differ from the reference.

    MLCommons does not check the values. Published logs count samples, samples in whole batches, or batches.
    """
    batch = log.global_batch
    if not is_finite(batch) or batch < 1:
        return []
    found = []
    for key in ("train_samples", "eval_samples"):
        for event in log.all(key)[:1]:
            if event.value is None or isinstance(event.value, str):
                found.append(f"line {event.line}: {key} {_not_a_count(event.value, 0)}")
            elif is_finite(event.value) and (wrong := wrong_size(key, int(event.value), int(batch), rules)):
                found.append(f"line {event.line}: {wrong}")
    return found


def disagreeing_progress(log: ParsedLog, rules: Rules) -> list[Refusal]:
    """Return contradictions between blocks and evaluations. Labels are used only if they can be interpreted."""
    blocks = blocks_of(log, rules)
    found = [*_shifted_evaluations(log, rules)]
    if blocks is not None:
        found += _gaps(log, rules, blocks)
    return [*found, *_evaluations_without_training(log, rules)]


def _gaps(log: ParsedLog, rules: Rules, blocks: Blocks) -> Iterator[Refusal]:
    """Yield refusals for missing training before or between blocks, and for evaluations that are not at block ends."""
    for before, after in pairwise(blocks.blocks):
        # Overlapping labels are not a gap: some programs number the first block from 1 and the others from 0.
        if after.start is not None and after.begin - before.end > blocks.tolerance:
            text = (
                f"line {after.start.line}: the block begins after {after.begin:.10g}, the one before ends after "
                f"{before.end:.10g}: training is missing"
            )
            yield Refusal("training-missing", text)
            break
    yield from _late_begin(log, blocks)
    off = [e for e in evaluations_of(log, rules) if math.isfinite(e.progress) and blocks.misses(e.progress)]
    if off:
        listed = ", ".join(f"{block.end:.10g}" for block in blocks.blocks[:8])
        text = (
            f"line {off[0].line}: an evaluation after {rules.progress_key} {off[0].progress:.10g} is where no block "
            f"ends: they end after {listed}" + (", ..." if len(blocks.blocks) > 8 else "")
        )
        yield Refusal("evaluation-untrained", text)


def _late_begin(log: ParsedLog, blocks: Blocks) -> Iterator[Refusal]:
    """Yield a refusal if training is missing before the first block."""
    starts, stops = log.all("block_start"), log.all("block_stop")
    if not starts or (stops and stops[0].line < starts[0].line):  # some logs lack the start of the first block
        return
    first = blocks.blocks[0]
    begin = first.begin
    if begin > max(blocks.tolerance, first.end - first.begin):
        text = f"line {starts[0].line}: the first block begins after {begin:.10g}: the training before it is missing"
        yield Refusal("training-missing", text)


def _shifted_evaluations(log: ParsedLog, rules: Rules) -> Iterator[Refusal]:
    """Yield a refusal if exactly one evaluation disagrees with the end of the block before it.

    Only logs whose evaluations and ends of blocks carry the same key are compared. If several evaluations disagree,
    the log counts differently or evaluates during the training, and is not refused.
    """
    key, before, compared = rules.progress_key, None, []
    for event in () if rules.scored_offline else log.events:
        if event.key == "block_stop" and is_finite(event.metadata.get(key)):
            before = event
        elif event.key == "block_start":
            before = None  # later evaluations may belong to the new block
        elif event.key == rules.quality_key and before is not None:
            evaluation = evaluation_of(event, key)
            if evaluation is not None and math.isfinite(evaluation.progress):
                compared.append((evaluation, before))
    off = [pair for pair in compared if pair[0].progress != pair[1].metadata[key]]
    if len(off) == 1 and len(compared) - 1 >= SURE_AGREEMENTS:
        evaluation, stop = off[0]
        text = (
            f"line {evaluation.line}: the evaluation after {key} {evaluation.progress:.10g} follows a block that ends "
            f"after {stop.metadata[key]:.10g} (line {stop.line}); all other evaluations of the log follow their block"
        )
        yield Refusal("evaluation-untrained", text)


def _evaluations_without_training(log: ParsedLog, rules: Rules) -> Iterator[Refusal]:
    """Yield a refusal if training is logged before some evaluations but not before several others.

    R-GAT may evaluate again at the end of an epoch, and offline scoring comes after all training; both are exempt.
    """
    if rules.scored_offline or rules.benchmark == "rgat":
        return
    starts = log.all("eval_start")
    evaluations = starts if len(starts) >= len(log.all(rules.quality_key)) else log.all(rules.quality_key)
    training = sorted(event.line for key in TRAINING_EVENTS for event in log.all(key))
    without = [
        after
        for before, after in pairwise(evaluations)
        if bisect_left(training, before.line) == bisect_left(training, after.line)
    ]
    if FEW <= len(without) < len(evaluations) - 1:
        text = (
            f"line {without[0].line}: no training is logged between this evaluation and the previous one, as before "
            f"{len(without)} of {len(evaluations)} evaluations; before the others it is"
        )
        yield Refusal("evaluation-untrained", text)


def odd_blocks(log: ParsedLog, rules: Rules) -> list[str]:
    """Return notes on blocks that are nested, not closed or labelled in an unknown way."""
    notes = []
    unpaired = [start or stop for start, stop in block_pairs(log) if start is None or stop is None]
    lines = [event.line for event in unpaired if event is not None]
    if lines:
        listed = ", ".join(map(str, lines[:8])) + (", ..." if len(lines) > 8 else "")
        notes.append(f"blocks without a start or an end: lines {listed}")
    comparable = rules.unit != "epoch fraction" and not rules.scored_offline
    if comparable and len(log.all("block_stop")) > 1 and blocks_of(log, rules) is None:
        notes.append("the labels of blocks do not agree with the evaluations: the two are not compared")
    return notes


TRAINING: dict[str, tuple[int, ...]] = {
    "resnet": (1_281_167,),
    "ssd300": (117_266, 118_287),  # images with objects; all images
    "retinanet": (1_170_301,),
    "maskrcnn": (117_266, 118_287),
    "unet3d": (168,),
    "dlrm": (4_195_197_692,),
    "dlrm_dcnv2": (4_195_197_692,),
    "stable_diffusion": (6_513_144,),
    "llama2_70b_lora": (3_901,),
    "rgat": (94_605_581,),
    "flux1": (1_099_776,),
    "cosmoflow": (524_288,),
    "deepcam": (121_266,),
    "oc20": (2_000_000,),
    "openfold": (594_595,),
}
"""Benchmark -> possible sizes of its training set, in samples.

Sources: the reference implementations, the rule files of the checkers, and the published logs of v0.7 to v6.0.
Benchmarks whose ``train_samples`` reports the number of trained samples (BERT, GPT-3, Llama 3.1) have none.
"""

EVALUATION: dict[str, tuple[int, ...]] = {
    "resnet": (50_000,),
    "ssd300": (5_000,),
    "retinanet": (24_781,),
    "maskrcnn": (5_000,),
    "unet3d": (42,),
    "rnnt": (2_703,),
    "bert": (10_000,),
    "dlrm": (89_137_318, 89_137_319),
    "dlrm_dcnv2": (89_137_319,),
    "stable_diffusion": (30_000,),
    "llama2_70b_lora": (173,),
    "llama31_8b": (1_024,),
    "llama31_405b": (5_760,),
    "rgat": (788_379,),
    "flux1": (29_696,),
    "cosmoflow": (65_536,),
    "deepcam": (15_158,),
    "oc20": (999_866,),
    "openfold": (180,),
}
"""Benchmark -> possible sizes of its evaluation set, in samples, from the same sources."""

PADDING = 1.5
"""Largest allowed ratio of padded to real evaluation samples. One published result pads 50,000 images to 65,536."""


def wrong_size(key: str, value: int, global_batch: int, rules: Rules) -> str | None:
    """Return why ``train_samples`` or ``eval_samples`` is not the size of the reference data set; None if it may be.

    Accepts samples, samples in whole batches, and batches, because published logs use all three.
    """
    sizes = (TRAINING if key == "train_samples" else EVALUATION).get(rules.benchmark)
    if sizes is None or any(_fits(key, value, size, global_batch) for size in sizes):
        return None
    return (
        f"{key} is {value:,}; the reference data set of {rules.benchmark} has "
        f"{' or '.join(f'{size:,}' for size in sizes)}"
    )


def _fits(key: str, value: int, size: int, global_batch: int) -> bool:
    batches = math.ceil(size / global_batch)
    if value in (size, batches):
        return True
    if key == "eval_samples":
        return size <= value <= PADDING * size
    return value in (batches * global_batch, (batches - 1) * global_batch)
