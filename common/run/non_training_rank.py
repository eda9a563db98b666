"""Base of the ranks of a run that do not train: they agree with the training ranks, and end with them."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import ClassVar

import torch

from common.config.schema import RunConfig, SessionConfig
from common.contract.workload import Workload
from common.distributed import job_store
from common.distributed.faults import Heartbeat
from common.distributed.layout import Layout
from common.distributed.rank_info import RankInfo, Role
from common.distributed.shared_folder import make_output
from common.distributed.startup import set_determinism
from common.errors import Interrupted, SuiteError
from common.mlperf.admission import admit
from common.observe.metrics import MetricsWriter
from common.observe.nvml import open_meter

OPENING_SECONDS = 30 * 60


class NonTrainingRank(ABC):
    """A rank of a job whose training ranks run a Trainer each. The constructor does not communicate.

    Attributes:
        activity: verb for the work of this rank in messages: "evaluates".

    Raises:
        ConfigError: the closed division forbids a configuration value.
    """

    activity: ClassVar[str]

    def __init__(
        self,
        workload_type: type[Workload],
        run: RunConfig,
        session: SessionConfig,
        rank_info: RankInfo,
        device: torch.device,
    ) -> None:
        self.workload_type = workload_type
        self.run, self.session, self.rank_info, self.device = run, session, rank_info, device
        self.role = Role.of(rank_info, run.other_ranks)
        self.rules = admit(run, session).rules

    def work(self) -> None:
        """Work until the training ranks announce the end.

        Raises:
            Interrupted: a signal stopped the training ranks.
            SuiteError: this rank failed; the message names it.
        """
        try:
            with contextlib.ExitStack() as stack:
                self._enter(stack)
        except Interrupted:
            raise
        except SuiteError as error:
            raise type(error)(f"rank {self.rank_info.rank}, which {self.activity}: {error}") from error

    @abstractmethod
    def sizes(self) -> dict[str, int]:
        """Return the sizes of the layout's axes for the ranks of this role."""

    @abstractmethod
    def until_the_end(self, stack: contextlib.ExitStack) -> int:
        """Work until the end of the run. Return the step at which a signal stopped training, or 0."""

    def _agree(self) -> None:
        """Get seed and folder from the training ranks, and report whether this rank sees the folder."""
        seed, output = job_store.from_rank_0("seed", ""), job_store.from_rank_0("output_dir", "")
        self.output_dir = Path(output)
        make_output(self.output_dir, self.run, self.session)
        self.layout = Layout(
            self.sizes(), self.role.rank, self.device, int(seed), self.role.name,
            self.run.system.network.ctas.by_axis(),
        )  # fmt: skip

    def _enter(self, stack: contextlib.ExitStack) -> None:
        self._agree()
        session, rank = self.session, self.rank_info.rank
        self.heartbeat = stack.enter_context(
            Heartbeat(self.rank_info, self.output_dir, session.timeout_seconds, role=self.role.name)
        )
        self.metrics = MetricsWriter(self.output_dir / f"metrics_rank{rank}.jsonl", rank)
        stack.callback(self.metrics.close)
        self.meter = open_meter(self.device, None, stack)
        with own_stream(self.device):
            stopped_at = self.until_the_end(stack)
        if stopped_at:
            raise Interrupted(f"stopped by a signal at step {stopped_at}; the log is closed as aborted")

    def build(self, stack: contextlib.ExitStack) -> Workload:
        """Build the workload; it is closed at the end."""
        set_determinism(self.run.deterministic)
        torch.manual_seed(self.layout.generator("torch").initial_seed())
        workload = self.workload_type(self.run, self.layout)
        stack.callback(workload.close)
        return workload

    def meet(self) -> None:
        """Wait until all ranks of the job are initialised."""
        job_store.meet("initialised", timedelta(minutes=self.rules.init_minutes))


@contextlib.contextmanager
def own_stream(device: torch.device) -> Iterator[None]:
    """Make a new stream current, because graphs cannot be captured on the default one; do nothing without a GPU."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.stream(torch.cuda.Stream(device)):
        yield
