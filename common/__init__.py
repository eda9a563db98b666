"""What two or more workloads share. Never imports from ``benchmarks``, but for the command line's table.

The packages form layers. A package imports only from lower layers, never from its own layer. ``tests/test_imports.py``
checks this.
"""

LAYERS: tuple[tuple[str, ...], ...] = (
    ("cli",),
    ("planning", "characterise"),
    ("run", "report"),
    ("doctor", "submission", "measure"),
    ("launch",),
    ("detection", "language", "recommendation"),
    ("vision",),
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
"""Layers of ``common/``: its packages and the three single modules; the highest layer first."""
