"""Workload of Llama 3.1 8B: its learning rate, data and memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar

from torch import Tensor, nn

from benchmarks.llama31_8b.config import LlamaConfig
from benchmarks.llama31_8b.data import ROWS
from common.config.schema import Declaration, RunConfig
from common.config.sections import unused_layers
from common.data.megatron.preparation import FORMAT
from common.language.memory import TrainedWorkspace
from common.language.pretraining import Pretraining, RowFacts
from common.language.workload import lowest_precision
from common.ops.operation import AUTO
from common.optim.learning_rate import cosine_to
from common.optim.memory_plan import MemoryPlan, plan


class LlamaPretraining(Pretraining):
    """Pre-training of Llama 3.1 8B on rows of tokens."""

    config_type: ClassVar[type] = LlamaConfig
    title = "Llama 3.1"
    axes: ClassVar[Mapping[str, str]] = {"dp": "have other rows", "cp": "share rows", "tp": "share layers"}
    rows = ROWS
    own: LlamaConfig

    def planned(self, capacity: int) -> MemoryPlan:
        """Return the plan of the memory of ``capacity`` bytes."""
        asked = self.own.model.recomputed_gate_up
        transposed = self.own.model.transposed_layers if self.layout.role == "train" else 0
        return plan(
            TrainedWorkspace(**self.trained_sizes()), capacity, None if asked == AUTO else int(asked), transposed
        )

    def recomputation(self) -> dict[str, int]:
        """Return ``recomputed_mlp``, layers that recompute gate and up, and ``transposed_layers``, 0 in evaluation."""
        asked = self.own.model.recomputed_gate_up
        recomputed = (0 if asked == AUTO else int(asked)) if self.memory is None else self.memory.recomputed
        transposed = self.own.model.transposed_layers if self.layout.role == "train" else 0
        return {"recomputed_mlp": recomputed, "transposed_layers": transposed}

    @classmethod
    def declare(cls, cfg: RunConfig) -> Declaration:
        """Declare data format, schedule, logged values, chunk graphs and the lowest precision.

        Also forbid training only some of the layers in a valid run.
        """
        own: LlamaConfig = cfg.workload
        last = min(own.facts.max_steps * cfg.global_batch, own.reader.index_rows)  # end of the order
        return Declaration(
            data_format=FORMAT,
            schedule_options={"last_samples": last},
            derived_values={
                "end_learning_rate": _end_rate(own),
                "decay_steps": own.facts.max_steps - own.hparams.warmup_steps,
            },
            chunk_graphs=True,
            forbidden=unused_layers(own, cls.whole, "layers"),
            lowest_precision=lowest_precision(own.model.linear, 1),
        )

    def decays(self, parameter: nn.Parameter) -> bool:
        """Return whether a parameter has weight decay: all except norms."""
        return parameter.ndim > 1

    def learning_rate(self) -> Callable[[Tensor], Tensor]:
        """Return the cosine with linear warm-up."""
        own = self.own
        rate, steps = own.hparams.base_learning_rate, own.facts.max_steps
        return cosine_to(rate, _end_rate(own), steps, own.hparams.warmup_steps)

    @property
    def row_facts(self) -> RowFacts:
        """Constants of the data that the reader needs."""
        facts = self.own.facts
        return RowFacts(facts.vocabulary, facts.row_length, self.cfg.benchmark.eval_samples, self.own.reader.index_rows)


def _end_rate(own: LlamaConfig) -> float:
    return own.facts.end_learning_rate_share * own.hparams.base_learning_rate
