"""Rows of C4: the evaluation set is the first rows of the validation set, as the rules require."""

from __future__ import annotations

from benchmarks.llama31_8b.raw import CORPUS, EVAL, TRAIN
from common.language.rows import CorpusRows

ROWS = CorpusRows(CORPUS, (TRAIN,), EVAL, extra_token=True, shuffle_documents=True)
