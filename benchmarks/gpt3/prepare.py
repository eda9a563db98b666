"""Download, prepare, verify and generate the data of GPT-3: C4 as pairs of Megatron files ``.bin`` and ``.idx``."""

from __future__ import annotations

from benchmarks.gpt3.raw import CORPUS
from common.data.megatron.commands import commands_for

COMMANDS = commands_for(CORPUS)
