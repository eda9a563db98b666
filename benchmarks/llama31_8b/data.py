"""Rows of C4: the evaluation set is the first rows of the validation set, as the rules require."""

from __future__ import annotations

from benchmarks.llama31_8b.prepare import CORPUS, EVAL, TRAIN
from common.language.pretraining import CorpusRows

ROWS = CorpusRows(CORPUS, (TRAIN,), EVAL, extra_token=True, shuffle_documents=True)
