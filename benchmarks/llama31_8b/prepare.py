"""Download, prepare, verify and generate the data of Llama 3.1 8B: C4 as pairs of Megatron files ``.bin``, ``.idx``."""

from __future__ import annotations

from benchmarks.llama31_8b.raw import CORPUS
from common.data.megatron.commands import commands_for

COMMANDS = commands_for(CORPUS)
