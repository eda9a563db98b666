"""Rows of the rules' table of hyperparameters that the compliance checker does not test.

Source: training_rules, section "Hyperparameters and optimizer", in the versions of August 2020 (round v0.7), May 2021
(v1.0) and of the last round of each benchmark. Names are those of the log; for some rows the table has another name
(``oversampling`` for ``training_oversampling``). The section begins with "By default, the hyperparameters must be the
same as the reference". Rules for hyperparameters without a row in the table say "as in the reference".

Rules that the rule files of every round test are omitted, because the checker reports them. These are all rules of
DLRM, DLRM-DCNv2, RNN-T, Stable Diffusion, FLUX.1, DeepSeek-V3, DLRMv4, Qwen3.5, MiniGo, DeepCAM and OpenFold.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from common.errors import ConfigError
from common.mlperf.parsed_log import is_number
from common.mlperf.rules import Rules, round_name

Logged = Mapping[str, object]


@dataclass(frozen=True)
class TextRule:
    """One row of the rules' table.

    Attributes:
        holds: returns whether a value of ``key`` obeys the rule, given all logged values; False for a wrong type.
        first, last: first and last ruleset with this row; None for the first or last that accepts the benchmark.
    """

    key: str
    text: str
    holds: Callable[[Any, Logged], bool]
    first: str | None = None
    last: str | None = None

    def rounds(self, rules: Rules) -> tuple[str, ...]:
        """Return the rulesets that have the row, oldest first."""
        versions = rules.accepted_by
        begin = 0 if self.first is None else versions.index(self.first)
        end = len(versions) if self.last is None else versions.index(self.last) + 1
        return versions[begin:end]

    def complaint(self, value: object, logged: Logged, rules: Rules) -> str | None:
        """Return how ``value`` breaks the rule, with its source; None if it obeys or the ruleset lacks the row.

        Args:
            logged: other values of the log, on which the limit may depend.
        """
        if rules.ruleset not in (rounds := self.rounds(rules)):
            return None
        try:
            if self.holds(value, logged):
                return None
        except ConfigError as error:
            return f"{self.key} = {value!r} cannot be judged: {error}"
        named = " to ".join(dict.fromkeys(round_name(end) for end in (rounds[0], rounds[-1])))
        source = "HPC rules" if rules.usage == "hpc" else "training_rules"
        return f"{self.key} = {value!r} breaks the rules' table: {self.text} ({source}, {named})"


def logged_number(logged: Logged, key: str) -> float:
    """Return the value of another key that a rule needs.

    Raises:
        ConfigError: the key is not logged, or its value is not a finite number.
    """
    value = logged.get(key)
    if not is_number(value) or not math.isfinite(value):
        raise ConfigError(f"{key} must be logged as a number, got {value!r}")
    return float(value)


def _same(value: object, fixed: object) -> bool:
    """Return whether two values are equal, with a relative tolerance of 1e-6 for numbers."""
    if isinstance(fixed, list | tuple):
        return isinstance(value, list | tuple) and len(value) == len(fixed) and all(map(_same, value, fixed))
    if is_number(value) and is_number(fixed):
        return math.isclose(value, fixed, rel_tol=1e-6)
    return type(value) is type(fixed) and value == fixed


def _fixed(key: str, *allowed: object, first: str | None = None, last: str | None = None, note: str = "") -> TextRule:
    """Return a row that allows only the given values."""
    text = " or ".join(str(value) for value in allowed) + note
    return TextRule(key, text, lambda value, _: any(_same(value, each) for each in allowed), first, last)


def _reference(key: str, value: object) -> TextRule:
    """Return the rule for a hyperparameter without a row in the table: it equals the reference."""
    return _fixed(key, value, note=", as in the reference: the table has no row that frees it")


def _whole(key: str, least: int) -> TextRule:
    """Return a row that allows integers of at least ``least``; 2.0 counts as an integer."""
    return TextRule(
        key,
        f"integer >= {least}",
        lambda value, _: is_number(value) and math.isfinite(value) and value == int(value) and value >= least,
    )


def _numeric(
    key: str,
    text: str,
    holds: Callable[[float, Logged], bool],
    first: str | None = None,
    last: str | None = None,
) -> TextRule:
    """Return a row with a formula."""
    return TextRule(key, text, lambda value, logged: is_number(value) and holds(value, logged), first, last)


def _optimizer(text: str, *names: str) -> TextRule:
    """Return the row on the optimizer. Compliant implementations have different names in the log."""
    return TextRule(
        "opt_name", text, lambda value, _: isinstance(value, str) and any(name in value.lower() for name in names)
    )


def _adam(prefix: str, beta_1: float, beta_2: float, epsilon: float) -> tuple[TextRule, ...]:
    """Return rules for Adam's betas and epsilon, for benchmarks whose table has no rows for them."""
    return (
        _reference(f"{prefix}_beta_1", beta_1),
        _reference(f"{prefix}_beta_2", beta_2),
        _reference(f"{prefix}_epsilon", epsilon),
    )


def _batch(logged: Logged) -> float:
    """Return the global batch.

    Raises:
        ConfigError: the batch is not logged, or is below 1.
    """
    batch = logged_number(logged, "global_batch_size")
    if batch < 1:
        raise ConfigError(f"global_batch_size must be at least 1, got {batch:g}")
    return batch


def _mask_rcnn_decay(steps: object, logged: Logged) -> bool:
    """Return whether both decay steps follow (60,000, 80,000) * (1 + K / 10) * 16 / batch with one integer K.

    The second step may differ by 1, the first by 6,000 * 16 / batch: a result of rounds v3.0 and v3.1 with a batch of
    256 has (6125, 8000) instead of (6000, 8000).
    """
    if not isinstance(steps, list | tuple) or len(steps) != 2 or not all(is_number(step) for step in steps):
        return False
    unit = 16 / _batch(logged)
    exact = 10 * (steps[1] / (80_000 * unit) - 1)
    if not math.isfinite(exact):
        return False
    k = round(exact)
    second, first = 80_000 * (1 + k / 10) * unit, 60_000 * (1 + k / 10) * unit
    return abs(steps[1] - second) <= 1 and 0 < steps[0] < steps[1] and abs(steps[0] - first) <= 6_000 * unit


def _ssd_boundaries(epochs: object, logged: Logged) -> bool:
    """Return whether the boundaries are 4 n and 5 n for an integer n."""
    if not isinstance(epochs, list | tuple) or len(epochs) != 2 or not all(is_number(epoch) for epoch in epochs):
        return False
    first, second = epochs
    return bool(second > 0 and second % 5 == 0 and 5 * first == 4 * second)


def _gpt3_learning_rate(rate: float, logged: Logged) -> bool:
    batch = _batch(logged)
    return (batch < 4096 and _same(rate, 2e-5)) or (batch > 3072 and _same(rate, 3e-5))


def _gpt3_decay_steps(steps: float, logged: Logged) -> bool:
    """Return whether the steps follow the formula, counted from step 0 or from the end of the warm-up."""
    wanted = 108_600 * 1536 / _batch(logged)
    warmup = logged.get("opt_learning_rate_warmup_steps", 0)
    return any(_within(steps, wanted - before) for before in (0, warmup) if is_number(before))


def _within(steps: float, wanted: float) -> bool:
    """Return whether ``steps`` equals ``wanted``, apart from rounding and counting from 0 or 1."""
    return abs(steps - wanted) < 2


def _tenth_of_base(rate: float, logged: Logged) -> bool:
    """Return whether the end rate is a tenth of the base rate. Some published logs state the fraction, 0.1, instead."""
    return _same(rate, 0.1 * logged_number(logged, "opt_base_learning_rate")) or _same(rate, 0.1)


def _between(value: object, low: float, high: float) -> bool:
    """Return whether a number, or each number of a list, is strictly between ``low`` and ``high``."""
    values = value if isinstance(value, list | tuple) else [value]
    return all(is_number(each) and low < each < high for each in values)


TEXT_RULES: dict[str, tuple[TextRule, ...]] = {
    "bert": (
        _optimizer("LAMB", "lamb"),
        _reference("opt_lamb_learning_rate_decay_poly_power", 1),
    ),
    "resnet": (
        _numeric(
            "lars_opt_momentum",
            "0.9 if the global batch is below 32k, which published results read as 32,000",
            lambda value, logged: _batch(logged) >= 32_000 or _same(value, 0.9),
        ),
        _reference("lars_eta", 0.001),
        _fixed("sgd_opt_momentum", 0.9),
        _fixed("sgd_opt_learning_rate_decay_poly_power", 2),
        _whole("sgd_opt_learning_rate_decay_steps", 0),
        _whole("opt_learning_rate_warmup_epochs", 0),
        _fixed("label_smoothing", 0, 0.1),
    ),
    "maskrcnn": (
        _optimizer("SGD with momentum", "sgd", "momentum"),
        TextRule(
            "opt_learning_rate_decay_steps",
            "(60000, 80000) * (1 + K / 10) * 16 / global_batch_size where K is integer",
            _mask_rcnn_decay,
        ),
        _fixed("min_image_size", 800, note=", fixed to reference"),
        _fixed("max_image_size", 1333, note=", fixed to reference"),
        _reference("opt_momentum", 0.9),
        _reference("opt_weight_decay", 1e-4),
    ),
    "ssd300": (
        _optimizer("SGD with momentum", "sgd", "momentum"),
        _whole("model_bn_span", 1),
        _whole("opt_learning_rate_warmup_factor", 0),
        _whole("opt_learning_rate_warmup_steps", 1),
        TextRule(
            "opt_learning_rate_decay_boundary_epochs",
            "[40, 50] * (1 + k / 10) with one integer k for both; the checker looks at the second alone",
            _ssd_boundaries,
        ),
        _reference("opt_learning_rate_decay_factor", 0.1),
        _reference("opt_momentum", 0.9),
    ),
    "retinanet": (
        _whole("opt_learning_rate_warmup_epochs", 0),
        *_adam("opt_adam", 0.9, 0.999, 1e-8),
    ),
    "unet3d": (
        _optimizer("SGD with momentum", "sgd", "nag", "momentum"),
        _fixed("oversampling", 0.4, note=", fixed to reference"),
        _fixed("training_input_shape", [128, 128, 128], note=", fixed to reference"),
        _fixed("validation_input_shape", [128, 128, 128], note=", fixed to reference"),
        _fixed("validation_overlap", 0.5, note=", fixed to reference"),
    ),
    "gpt3": (
        _numeric(
            "global_batch_size",
            "1,536 to 8,192, for which there are reference convergence points",
            lambda value, _: 1536 <= value <= 8192,
        ),
        _numeric(
            "init_checkpoint_step",
            "ceil(4,000 * 1,536 / batch), since training goes on from the published checkpoint (assets_dir)",
            lambda value, logged: value == math.ceil(4000 * 1536 / _batch(logged)),
        ),
        _fixed("opt_weight_decay", 0.1),
        _numeric(
            "opt_base_learning_rate",
            "2e-5 for global batches of 1,536 up to 3,072, 3e-5 for 4,096 up to 8,192, either between",
            _gpt3_learning_rate,
        ),
        _numeric("opt_end_learning_rate", "10 % of opt_base_learning_rate", _tenth_of_base),
        _numeric(
            "opt_learning_rate_warmup_steps",
            "ceil(265 * 1,536 / batch)",
            lambda value, logged: _within(value, 265 * 1536 / _batch(logged)),
        ),
        _numeric("opt_learning_rate_decay_steps", "ceil(108,600 * 1,536 / batch)", _gpt3_decay_steps),
        _fixed("hidden_dropout", 0.0),
        _fixed("attention_dropout", 0.0),
    ),
    "llama2_70b_lora": (
        _optimizer("AdamW", "adam"),
        _fixed("opt_gradient_clip_norm", 0.3),
        _fixed("opt_adamw_weight_decay", 0.0001),
        _fixed("lora_alpha", 32),
        _fixed("lora_dropout", 0.1),
        *_adam("opt_adamw", 0.9, 0.999, 1e-8),
    ),
    "rgat": (
        *_adam("opt_adam", 0.9, 0.999, 1e-8),
        _reference("opt_weight_decay", 0.0),
    ),
    "llama31_405b": (
        _numeric("opt_end_learning_rate", "8e-7", lambda value, _: _same(value, 8e-7)),
        _numeric(
            "opt_learning_rate_warmup_steps",
            "ceil(8,000 * 1,152 / batch)",
            lambda value, logged: _within(value, 8000 * 1152 / _batch(logged)),
        ),
        _numeric(
            "opt_learning_rate_decay_steps",
            "ceil(1,200,000 * 1,152 / batch) - ceil(8,000 * 1,152 / batch)",
            lambda value, logged: _within(value, 1_192_000 * 1152 / _batch(logged)),
            last="5.0.0",
        ),
    ),
    "llama31_8b": (_numeric("opt_end_learning_rate", "0.1 * opt_base_learning_rate", _tenth_of_base),),
    "gpt_oss_20b": (
        _numeric(
            "opt_end_learning_rate",
            "0.1 * opt_base_learning_rate, or 4e-5",
            lambda value, logged: _same(value, 4e-5) or _tenth_of_base(value, logged),
            last="6.0.0",
        ),
        _numeric("opt_end_learning_rate", "0.1 * opt_base_learning_rate", _tenth_of_base, first="6.1.0"),
    ),
    "cosmoflow": (
        _reference("opt_momentum", 0.9),
        TextRule("opt_learning_rate_decay_factor", "each 0 < factor < 1", lambda value, _: _between(value, 0, 1)),
    ),
    "oc20": (
        _numeric("opt_learning_rate_warmup_factor", "0 <= factor <= 1", lambda value, _: 0 <= value <= 1),
        _numeric("opt_learning_rate_decay_factor", "0 < factor < 1", lambda value, _: 0 < value < 1),
        _reference("opt_adamw_weight_decay", 0.01),
        *_adam("opt_adamw", 0.9, 0.999, 1e-8),
    ),
}
"""Benchmark -> rows of the rules' table that the checker does not test."""
