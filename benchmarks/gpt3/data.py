"""Rows of C4: the training set has two halves, and the evaluation set is the whole validation subset."""

from __future__ import annotations

from benchmarks.gpt3.prepare import CORPUS, EVAL, HALVES
from common.language.pretraining import CorpusRows

ROWS = CorpusRows(CORPUS, HALVES, EVAL, extra_token=False, shuffle_documents=False)
