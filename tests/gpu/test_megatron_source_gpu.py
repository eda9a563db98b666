"""Rows of tokens in pinned memory, which a copy to the GPU need not wait for."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from common.data.batches import Block
from common.data.megatron.indexed import indexed_writer
from common.data.megatron.source import RowShape, RowStream, eval_source, open_in_order, train_source
from common.data.order import EvalShard, MicroBatches

pytestmark = pytest.mark.gpu

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)


def test_batches_are_pinned_and_whole(tmp_path):
    stream = np.random.default_rng(0).integers(0, 1000, 401)
    with indexed_writer(tmp_path / "x", 1000) as writer:
        for document in np.split(stream, [7, 30, 200]):
            writer.add(document)
    shape = RowShape(8, 1000, extra_token=True)
    rows = open_in_order(tmp_path / "x", shape, keep_partial=False)
    train = train_source(rows, shape, RowStream(MicroBatches(2), 50), 3, stand_in=True, pin_memory=True)
    evaluation = eval_source(rows, shape, EvalShard(3, 2), pin_memory=True)
    trained, evaluated = list(train.batches(Block(0, 1, 0, 0, 50))), list(evaluation)
    train.close()
    evaluation.close()

    for batch in (*trained, *evaluated):
        assert all(tensor.is_pinned() for tensor in batch.tensors.values())
    found = torch.cat([batch.tensors["tokens"].to("cuda", non_blocking=True) for batch in trained]).cpu()
    assert found.tolist() == [stream[8 * row : 8 * row + 9].tolist() for row in range(50)]
    assert evaluated[1].tensors["present"].cuda().tolist() == [True, False]
