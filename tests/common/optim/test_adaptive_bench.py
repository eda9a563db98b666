"""The LAMB bench: its BERT is the rules' one, its bytes are those of the passes, and it runs on a CPU."""

import math
import re

import pytest
import torch

from common.optim.adaptive_bench import BERT_LARGE, SMALL, bert_shapes, build_shard, bytes_by_pass, main


def elements(shapes, prefix: str = "") -> int:
    return sum(math.prod(shape) for name, shape in shapes.items() if name.startswith(prefix))


def test_bert_large_is_that_of_the_rules():
    shapes = bert_shapes(BERT_LARGE)
    assert len(shapes) == 398
    assert elements(shapes) == 336_226_108
    blocks = {prefix: elements(shapes, prefix) for prefix in ("embeddings.", "layers.7.", "pooler.", "masked_lm.")}
    assert blocks == {
        "embeddings.": 31_782_912,
        "layers.7.": 12_596_224,
        "pooler.": 1_049_600,
        "masked_lm.": 1_082_170,
    }


@pytest.mark.parametrize(
    ("dtype", "trust", "per_weight"),
    [(torch.bfloat16, True, 42), (torch.float32, True, 44), (torch.bfloat16, False, 30), (torch.float32, False, 32)],
)
def test_bytes_of_an_update(dtype, trust, per_weight):
    shapes = {"w": (100, 70)}
    moved = bytes_by_pass(build_shard(shapes, dtype, torch.device("cpu")), trust)
    assert sum(moved.values()) == 7000 * per_weight


def test_biases_are_updated_in_one_pass():
    shard = build_shard({"w": (100, 70), "b": (100,)}, torch.bfloat16, torch.device("cpu"))
    assert sum(bytes_by_pass(shard, True).values()) == 7000 * 42 + 100 * 30


def test_shard_of_the_bench_holds_every_tensor():
    shapes = bert_shapes(SMALL)
    shard = build_shard(shapes, torch.float32, torch.device("cpu"))
    assert [f.numel for f in shard.fragments] == [math.prod(shape) for shape in shapes.values()]
    assert [f.group for f in shard.fragments] == [int(len(shape) == 1) for shape in shapes.values()]
    assert all(torch.all(shard.gradients[f.start + f.numel : f.stop] == 0) for f in shard.fragments)


@pytest.mark.skipif(torch.cuda.is_available(), reason="would time the GPU")
def test_bench_runs_on_a_cpu(capsys):
    main(["--layers", "0", "--hidden", "16"])
    printed = capsys.readouterr().out
    assert printed.startswith("lamb, 14 tensors, ")
    milliseconds = re.search(r"update \(reference\) +([\d.]+) ms", printed)
    assert milliseconds is not None
    assert float(milliseconds[1]) > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU these are supported")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sweep"], "needs a GPU"),
        (["--implementation", "triton"], "needs a GPU"),
        (["--implementation", "fastest"], "no implementation"),
        (["--hidden", "0"], "at least 1"),
    ],
)
def test_bench_says_what_it_cannot_do(arguments, message, capsys, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(SystemExit) as stopped:
        main([*arguments, "--layers", "0"])
    assert stopped.value.code not in (0, None)
    assert message in capsys.readouterr().err
