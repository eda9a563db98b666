"""Measures of self-play on one rank: its rates, how full the batches are, and what limits it."""

from __future__ import annotations

from dataclasses import astuple, dataclass


@dataclass
class ServerCounts:
    """Counts and times of an inference server and its workers.

    Attributes:
        batches: evaluated batches.
        positions: evaluated leaves.
        computed: the same with padding.
        hits: leaves whose evaluation the workers' caches had.
        games: finished games.
        search_seconds: time that all workers have searched, and not waited for answers.
        inference_seconds: time that the server has waited for the network.
        idle_seconds: time that the server has waited for requests, because all workers searched.
        seconds: time that the server has run.
    """

    batches: int = 0
    positions: int = 0
    computed: int = 0
    hits: int = 0
    games: int = 0
    search_seconds: float = 0.0
    inference_seconds: float = 0.0
    idle_seconds: float = 0.0
    seconds: float = 0.0

    def since(self, before: ServerCounts) -> ServerCounts:
        """Return the counts and times since ``before``."""
        return ServerCounts(*(now - then for now, then in zip(astuple(self), astuple(before), strict=True)))

    def measures(self, workers: int) -> dict[str, float | str]:
        """Return rates and shares; empty if the server has not run.

        ``bound`` names the largest of three shares of the time: ``search_share``, in which a worker searches;
        ``inference_share``, in which the server waits for the network; ``queue_share``, in which it handles requests.

        Args:
            workers: number of workers.
        """
        if not self.batches:
            return {}
        shares = {
            "search": self.search_seconds / (workers * self.seconds),
            "inference": self.inference_seconds / self.seconds,
            "queue": 1.0 - (self.inference_seconds + self.idle_seconds) / self.seconds,
        }
        return {
            "games": self.games,
            "seconds": self.seconds,
            "games_per_second": self.games / self.seconds,
            "leaves_per_second": self.positions / self.seconds,
            "cache_hits": self.hits / (self.hits + self.positions),
            "batch_leaves": self.positions / self.batches,
            "batch_fill": self.positions / self.computed,
            "search_us_per_leaf": 1e6 * self.search_seconds / self.positions,
            **{f"{name}_share": share for name, share in shares.items()},
            "bound": max(shares, key=lambda name: shares[name]),
        }
