"""Sizes of the CosmoFlow recipe, for the cases of its operations."""

from __future__ import annotations

from benchmarks.cosmoflow.model import CosmoFlowArchitecture
from common.mlperf.fixed import fixed_facts

FACTS = fixed_facts(CosmoFlowArchitecture, "cosmoflow")
SAMPLES = 8
"""Samples per micro-batch."""
