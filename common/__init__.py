"""What two or more workloads share. Never imports from ``benchmarks``, but for the command line's table.

The rooms stand on floors: a room uses those of lower floors, and none beside it. ``tests/test_imports.py`` holds the
house to that.
"""

FLOORS: tuple[tuple[str, ...], ...] = (
    ("cli",),
    ("run", "report"),
    ("doctor", "submission", "measure"),
    ("launch",),
    ("detection", "recommendation"),
    ("evaluation",),
    ("contract",),
    ("step",),
    ("optim", "nn"),
    ("distributed",),
    ("observe",),
    ("mlperf",),
    ("config",),
    ("ops",),
    ("data",),
    ("formats",),
    ("untrusted",),
    ("errors", "optional_packages"),
)
"""Rooms of ``common/``, and the three files that stand alone; the highest floor first."""
