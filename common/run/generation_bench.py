"""``mlperf-suite bench`` of self-play: where the time of one generation goes."""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from common.config.schema import RunConfig
from common.contract.workload import Workload
from common.data.batches import Block, GenerationSource
from common.data.prefetch import Prefetcher, side_stream
from common.distributed import job_store
from common.distributed.groups import of_all_ranks
from common.run.kernel_profile import meet
from common.step.graphs import StepRunner


@dataclass(frozen=True)
class GenerationTiming:
    """Seconds of one generation, on the slowest rank.

    Attributes:
        self_play: until its games are complete and the first step has its examples.
        training: its steps.
        hand_over: saving the model.
        evaluation: its games against the target, which do not count in a run.
        steps: optimizer steps.
        games: games of the newest generation.
        global_batch: examples per step.
    """

    self_play: float
    training: float
    hand_over: float
    evaluation: float
    steps: int
    games: int
    global_batch: int

    def rows(self) -> dict[str, str]:
        """Return the output rows of ``bench``, name to text."""
        examples = self.steps * self.global_batch
        return {
            "generation": f"{self.self_play + self.training + self.hand_over:.2f} s without its evaluation",
            "generation: self-play": f"{self.self_play:.2f} s, {self.games:,} games, "
            f"{self.games / self.self_play:,.2f} games/s",
            "generation: training": f"{self.training:.2f} s, {self.steps:,} steps, "
            f"{examples / self.training:,.1f} samples/s",
            "generation: saving the model": f"{self.hand_over:.3f} s",
            "generation: evaluation": f"{self.evaluation:.2f} s",
        }


def time_generation(
    run: RunConfig, data_dir: Path, workload: Workload, runner: StepRunner, blocks: Sequence[Block]
) -> GenerationTiming:
    """Train on the blocks with a hand-over after each one; time the last one and its evaluation. Collective.

    The folder of self-play is a temporary one, so all ranks are on one machine. Ranks that only play or evaluate have
    no part in it.

    Raises:
        DataError: the data are missing or damaged, or not those of the workload.
    """
    cuda = workload.layout.device.type == "cuda"
    seconds: list[float] = []

    def end_phase() -> None:
        meet(cuda)
        seconds.append(time.perf_counter())

    evaluation = workload.evaluation(workload.layout)
    with tempfile.TemporaryDirectory() as own, runner.on_stream():
        workload.warm_up_reader()
        evaluation.warm_up()
        workload.scratch(Path(job_store.from_rank_0("bench/self-play", own)), None)
        source = workload.open_data(data_dir)
        assert isinstance(source, GenerationSource), "blocks without samples are generations"
        evaluation.open_data(data_dir)
        runner.warm_up(workload.examples_of_data(), iterations=1)
        prefetcher = Prefetcher(workload.prepare, run.grad_accumulation_steps, side_stream(workload.layout.device))
        steps = 0
        for block in blocks:
            seconds.clear()
            end_phase()
            prefetcher.begin(source.batches(block))
            end_phase()
            steps = 0
            while (batches := prefetcher.take()) is not None:
                runner(batches)
                prefetcher.consumed()
                steps += 1
            end_phase()
            source.trained(block, workload.weights().tensors)
            end_phase()
        games = source.games(blocks[-1])[-1]
        evaluation.predict(workload.weights())
        end_phase()
        source.close()
        evaluation.close()
        end_phase()  # the folder is deleted after the last rank has left it
    took = [later - earlier for earlier, later in itertools.pairwise(seconds)][:4]
    self_play, training, hand_over, evaluated = (max(times) for times in zip(*of_all_ranks(took), strict=True))
    return GenerationTiming(self_play, training, hand_over, evaluated, steps, games, run.global_batch)
