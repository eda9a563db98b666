"""Main loop of a rank that only plays: build the workload, then play games until the training ranks end the run."""

from __future__ import annotations

import contextlib
import itertools
import time

from common.config.schema import RunConfig
from common.data.batches import PLAY_SECONDS
from common.distributed import job_store
from common.distributed.faults import GracefulStop, PeerFailed
from common.distributed.rank_info import RankInfo
from common.run.non_training_rank import NonTrainingRank

MEASURE_SECONDS = 60.0
"""Interval at which a rank records its measures, in seconds."""
SELF_PLAY_ENDS, RUN_ENDS = "self-play ends", "run ends"
"""Names under which training rank 0 announces the end of the training, and then of the run.

The value is the step at which a signal stopped training, 0 if none did, or :data:`FAILED`.
"""
FAILED = "failed"


class PlayRank(NonTrainingRank):
    """One rank of a run that plays games with each new model, and writes them for the training ranks."""

    activity = "plays"

    def sizes(self) -> dict[str, int]:
        """Return one axis: each of these ranks plays alone."""
        return {"dp": self.role.world_size}

    def until_the_end(self, stack: contextlib.ExitStack) -> int:
        """Play until training ends, then wait for the end of the run. Return the step at which a signal stopped it."""
        with self.heartbeat.extended(60 * self.rules.init_minutes, "initialisation"):
            workload = self.build(stack)
            workload.warm_up_reader()
            workload.scratch(self.output_dir, None)
            player = workload.player()
            self.meet()
        job_store.from_rank_0("run_start", "")
        stack.enter_context(GracefulStop())  # the training ranks decide when a run ends that gets a signal
        rounds, written = itertools.count(1), time.monotonic()

        def play() -> None:
            nonlocal written
            if player.play(PLAY_SECONDS):
                self.heartbeat.beat(next(rounds), "self-play")
            if time.monotonic() - written >= MEASURE_SECONDS and (measures := player.measures()):
                self.metrics.self_play(**measures)
                self.metrics.flush()
                written = time.monotonic()

        with contextlib.closing(player):
            job_store.from_rank_0(SELF_PLAY_ENDS, "", meanwhile=play)
        with self.heartbeat.idle("waiting for the end of the run"):
            ended = job_store.from_rank_0(RUN_ENDS, "", meanwhile=lambda: time.sleep(PLAY_SECONDS))
        if ended == FAILED:
            raise PeerFailed("the training ranks have failed")
        return int(ended)


class PlayRanks:
    """The ranks of a run that only play, as its training ranks see them. Only rank 0 sends them messages."""

    def __init__(self, run: RunConfig, rank_info: RankInfo) -> None:
        self._unsent = [SELF_PLAY_ENDS, RUN_ENDS] if run.selfplay.ranks and rank_info.rank == 0 else []

    def training_ends(self) -> None:
        """End self-play."""
        self._send("0", len(self._unsent) - 1)

    def run_ends(self, stopped_at: int | None) -> None:
        """Dismiss the ranks.

        Args:
            stopped_at: step at which a signal stopped the run; 0 for a run that ended by itself, None for a failed one.
        """
        self._send(FAILED if stopped_at is None else str(stopped_at), len(self._unsent))

    def _send(self, value: str, count: int) -> None:
        for _ in range(count):
            job_store.from_rank_0(self._unsent.pop(0), value)
