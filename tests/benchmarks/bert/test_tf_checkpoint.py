"""The starting checkpoint: TensorFlow's format, the original's names, and what is wrong with broken ones."""

from __future__ import annotations

import pickle
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.bert.config import Facts
from benchmarks.bert.model import Bert
from benchmarks.bert.tf_checkpoint import find_checkpoint, initial_weight_names, load_weights
from common.errors import CheckpointError
from common.formats.tensor_bundle import TensorBundle
from common.mlperf.fixed import fixed_facts
from tests.common.formats.bundle_writer import number, write_bundle

V, E, F, P, L = 70, 8, 12, 16, 2
SIZES = {"vocabulary": V, "hidden": E, "layers": L, "heads": 2, "feed_forward": F, "max_sequence_length": P}
ARCHITECTURE = fixed_facts(Facts, "bert", **SIZES)

# The original's variables.


def original() -> dict[str, np.ndarray]:
    """Variables of a small model in the original's order: every name and shape is spelt out here."""
    shapes: dict[str, tuple[int, ...]] = {
        "bert/embeddings/word_embeddings": (V, E),
        "bert/embeddings/token_type_embeddings": (2, E),
        "bert/embeddings/position_embeddings": (P, E),
        "bert/embeddings/LayerNorm/beta": (E,),
        "bert/embeddings/LayerNorm/gamma": (E,),
    }
    for i in range(L):
        layer = f"bert/encoder/layer_{i}"
        for name in ("query", "key", "value"):
            shapes |= {
                f"{layer}/attention/self/{name}/kernel": (E, E),
                f"{layer}/attention/self/{name}/bias": (E,),
            }
        shapes |= {
            f"{layer}/attention/output/dense/kernel": (E, E),
            f"{layer}/attention/output/dense/bias": (E,),
            f"{layer}/attention/output/LayerNorm/beta": (E,),
            f"{layer}/attention/output/LayerNorm/gamma": (E,),
            f"{layer}/intermediate/dense/kernel": (E, F),
            f"{layer}/intermediate/dense/bias": (F,),
            f"{layer}/output/dense/kernel": (F, E),
            f"{layer}/output/dense/bias": (E,),
            f"{layer}/output/LayerNorm/beta": (E,),
            f"{layer}/output/LayerNorm/gamma": (E,),
        }
    shapes |= {
        "bert/pooler/dense/kernel": (E, E),
        "bert/pooler/dense/bias": (E,),
        "cls/predictions/transform/dense/kernel": (E, E),
        "cls/predictions/transform/dense/bias": (E,),
        "cls/predictions/transform/LayerNorm/beta": (E,),
        "cls/predictions/transform/LayerNorm/gamma": (E,),
        "cls/predictions/output_bias": (V,),
        "cls/seq_relationship/output_weights": (2, E),
        "cls/seq_relationship/output_bias": (2,),
    }
    random = np.random.default_rng(1)
    return {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def with_slots(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The variables with what their optimizer kept beside them."""
    slots = {
        f"{name}/{slot}": np.full_like(value, 9) for name, value in tensors.items() for slot in ("adam_m", "adam_v")
    }
    return {**tensors, **slots, "global_step": np.array(28252, np.int64), "beta1_power": np.array(0.9, np.float32)}


def padded(rows: np.ndarray, count: int) -> np.ndarray:
    return np.concatenate([rows, np.zeros((count - len(rows), *rows.shape[1:]), rows.dtype)])


def expected_parameters(tf: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Our parameters, written out from the variables of :func:`original`."""
    own = {
        "embeddings.word.weight": padded(tf["bert/embeddings/word_embeddings"], 128),
        "embeddings.position.weight": tf["bert/embeddings/position_embeddings"],
        "embeddings.segment.weight": tf["bert/embeddings/token_type_embeddings"],
        "embeddings.norm.weight": tf["bert/embeddings/LayerNorm/gamma"],
        "embeddings.norm.bias": tf["bert/embeddings/LayerNorm/beta"],
        "pooler.weight": tf["bert/pooler/dense/kernel"].T,
        "pooler.bias": tf["bert/pooler/dense/bias"],
        "masked_lm.transform.weight": tf["cls/predictions/transform/dense/kernel"].T,
        "masked_lm.transform.bias": tf["cls/predictions/transform/dense/bias"],
        "masked_lm.norm.weight": tf["cls/predictions/transform/LayerNorm/gamma"],
        "masked_lm.norm.bias": tf["cls/predictions/transform/LayerNorm/beta"],
        "masked_lm.bias": padded(tf["cls/predictions/output_bias"], 128),
        "next_sentence.weight": tf["cls/seq_relationship/output_weights"],
        "next_sentence.bias": tf["cls/seq_relationship/output_bias"],
    }
    for i in range(L):
        layer, ours = f"bert/encoder/layer_{i}", f"layers.{i}"
        qkv = [f"{layer}/attention/self/{name}" for name in ("query", "key", "value")]
        own |= {
            f"{ours}.attention.qkv.weight": np.concatenate([tf[f"{name}/kernel"].T for name in qkv]),
            f"{ours}.attention.qkv.bias": np.concatenate([tf[f"{name}/bias"] for name in qkv]),
            f"{ours}.attention.output.weight": tf[f"{layer}/attention/output/dense/kernel"].T,
            f"{ours}.attention.output.bias": tf[f"{layer}/attention/output/dense/bias"],
            f"{ours}.attention.norm.weight": tf[f"{layer}/attention/output/LayerNorm/gamma"],
            f"{ours}.attention.norm.bias": tf[f"{layer}/attention/output/LayerNorm/beta"],
            f"{ours}.mlp.up.weight": tf[f"{layer}/intermediate/dense/kernel"].T,
            f"{ours}.mlp.up.bias": tf[f"{layer}/intermediate/dense/bias"],
            f"{ours}.mlp.down.weight": tf[f"{layer}/output/dense/kernel"].T,
            f"{ours}.mlp.down.bias": tf[f"{layer}/output/dense/bias"],
            f"{ours}.mlp.norm.weight": tf[f"{layer}/output/LayerNorm/gamma"],
            f"{ours}.mlp.norm.bias": tf[f"{layer}/output/LayerNorm/beta"],
        }
    return own


def blank(dtype: torch.dtype = torch.float32) -> Bert:
    """A model to load into, whose every number is wrong."""
    model = Bert(ARCHITECTURE, None, dtype=dtype)
    for parameter in model.parameters():
        parameter.data.fill_(-77.0)
    return model


def wrong(model: Bert, expected: dict[str, np.ndarray]) -> list[str]:
    """Parameters that are not ``expected``."""
    found = {name: parameter.detach() for name, parameter in model.named_parameters()}
    assert set(found) == set(expected)
    return [
        n for n, value in expected.items() if not torch.equal(found[n], torch.from_numpy(value.copy()).to(found[n]))
    ]


def test_the_original_has_398_weights_in_the_order_of_their_creation():
    names, small = initial_weight_names(), list(original())
    assert len(names) == len(set(names)) == 398
    assert names[: 5 + 16 * L] == small[: 5 + 16 * L]
    assert names[5 + 16 * 24 :] == small[5 + 16 * L :]
    assert names[5 + 16 * 23] == "bert/encoder/layer_23/attention/self/query/kernel"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_parameter_comes_from_its_variable(dtype, tmp_path):
    tensors = original()
    write_bundle(tmp_path / "model.ckpt-28252", with_slots(tensors), shards=2)
    model = blank(dtype)
    load_weights(model, tmp_path / "model.ckpt-28252")
    assert not wrong(model, expected_parameters(tensors))


@pytest.mark.parametrize("place", ["tf1_ckpt", "input_files/tf1_ckpt"])
@pytest.mark.parametrize("end", ["", "-003"], ids=["own name", "MLCommons' name"])
def test_the_checkpoint_is_found_as_the_bucket_names_it(place, end, tmp_path):
    """The data file has ``-003`` in its name there, and the index has not; another checkpoint lies beside."""
    tensors, data = original(), "data-00000-of-00001"
    for folder in (tmp_path / place, (tmp_path / place).with_name("tf2_ckpt")):
        folder.mkdir(parents=True)
    write_bundle(tmp_path / place / "model.ckpt-28252", tensors)
    (tmp_path / place / f"model.ckpt-28252.{data}").rename(tmp_path / place / f"model.ckpt-28252{end}.{data}")
    write_bundle((tmp_path / place).with_name("tf2_ckpt") / "model.ckpt-28252", {"other": np.zeros(1, np.float32)})
    model = blank()
    load_weights(model, find_checkpoint(tmp_path, "tf1_ckpt/model.ckpt-28252"))
    assert not wrong(model, expected_parameters(tensors))


def in_torch(tensors: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    """The variables under the names, and in the orientation, of the PyTorch port."""
    port = {}
    for name, value in tensors.items():
        new = re.sub(r"layer_(\d+)", r"layer/\1", name).replace("/", ".")
        for old, renamed in (
            ("_embeddings", "_embeddings.weight"),
            (".kernel", ".weight"),
            (".gamma", ".weight"),
            (".beta", ".bias"),
            ("output_bias", "bias"),
            ("output_weights", "weight"),
        ):
            new = new.removesuffix(old) + renamed if new.endswith(old) else new
        port[new] = torch.from_numpy(value.T.copy() if name.endswith("kernel") else value)
    return port


@pytest.mark.parametrize("rows", [V, 72, 128])
@pytest.mark.parametrize("under_model", [True, False])
def test_pytorch_file_has_the_same_weights(rows, under_model, tmp_path):
    tensors = original()
    state = in_torch(tensors)
    for name in ("bert.embeddings.word_embeddings.weight", "cls.predictions.bias"):
        state[name] = torch.cat([state[name], torch.full((rows - V, *state[name].shape[1:]), 5.0)])
    state["cls.predictions.decoder.weight"] = state["bert.embeddings.word_embeddings.weight"]
    torch.save({"model": state} if under_model else state, tmp_path / "weights.pt")
    model = blank()
    load_weights(model, tmp_path / "weights.pt")
    assert not wrong(model, expected_parameters(tensors))


def test_pytorch_file_may_name_its_activations(tmp_path):
    tensors = original()
    pattern = re.compile(r"(intermediate|pooler|transform)\.dense\.")
    state = {pattern.sub(r"\1.dense_act.", name): value for name, value in in_torch(tensors).items()}
    torch.save({"model": state}, tmp_path / "weights.pt")
    model = blank()
    load_weights(model, tmp_path / "weights.pt")
    assert not wrong(model, expected_parameters(tensors))


# What can be wrong.

KERNEL = "bert/encoder/layer_1/output/dense/kernel"


def load(prefix: Path) -> str:
    """The message of loading ``prefix``."""
    with pytest.raises(CheckpointError) as raised:
        load_weights(blank(), prefix)
    return str(raised.value)


def test_the_error_for_a_missing_index_explains_checkpoint_names(tmp_path):
    message = load(tmp_path / "none")
    assert message.startswith(f"{tmp_path}/none.index: No such file")
    assert "without .index" in message


def test_missing_data_file_is_named_with_a_tensor(tmp_path):
    write_bundle(tmp_path / "ckpt", original(), shards=2)
    (tmp_path / "ckpt.data-00001-of-00002").unlink()
    message = load(tmp_path / "ckpt")
    assert message.startswith(f"{tmp_path}/ckpt.data-00001-of-00002: No such file")
    assert "tensor bert/" in message


def test_truncated_data_name_the_tensor_that_ends_early(tmp_path):
    write_bundle(tmp_path / "ckpt", {**original(), "z": np.zeros(1, np.float32)})
    data = tmp_path / "ckpt.data-00000-of-00001"
    data.write_bytes(data.read_bytes()[:-5])
    assert "truncated: tensor cls/seq_relationship/output_weights is bytes" in load(tmp_path / "ckpt")


def test_a_flipped_bit_is_found(tmp_path):
    write_bundle(tmp_path / "ckpt", original())
    data = tmp_path / "ckpt.data-00000-of-00001"
    content = bytearray(data.read_bytes())
    content[-3] ^= 16
    data.write_bytes(content)
    assert "the checksum of tensor cls/seq_relationship/output_weights is wrong" in load(tmp_path / "ckpt")


def test_missing_tensor_is_named(tmp_path):
    tensors = original()
    del tensors[KERNEL]
    write_bundle(tmp_path / "ckpt", tensors)
    assert load(tmp_path / "ckpt") == f"{tmp_path}/ckpt.index: tensor {KERNEL} is missing"


def test_tensor_of_another_shape_is_named_with_both(tmp_path):
    write_bundle(tmp_path / "ckpt", {**original(), KERNEL: np.zeros((E, F), np.float32)})
    assert f"tensor {KERNEL} has shape [8, 12], and the model needs [12, 8]" in load(tmp_path / "ckpt")


def test_padded_vocabulary_is_not_the_originals(tmp_path):
    name = "bert/embeddings/word_embeddings"
    write_bundle(tmp_path / "ckpt", {**original(), name: np.zeros((72, E), np.float32)})
    assert f"tensor {name} has shape [72, 8], and the model needs [70, 8]" in load(tmp_path / "ckpt")


def test_unknown_dtype_is_named(tmp_path):
    write_bundle(tmp_path / "ckpt", original(), dtypes={KERNEL: 12})
    assert f"tensor {KERNEL} has dtype number 12, which is not supported" in load(tmp_path / "ckpt")


def test_dtype_that_does_not_fit_the_bytes_is_an_error(tmp_path):
    write_bundle(tmp_path / "ckpt", original(), dtypes={KERNEL: 2})
    assert f"tensor {KERNEL} of shape [12, 8] has 384 bytes" in load(tmp_path / "ckpt")


def test_integers_are_no_weights(tmp_path):
    write_bundle(tmp_path / "ckpt", {**original(), KERNEL: np.zeros((F, E), np.int32)})
    assert f"tensor {KERNEL} has dtype torch.int32" in load(tmp_path / "ckpt")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_finite_are_named(value, tmp_path):
    kernel = np.zeros((F, E), np.float32)
    kernel[3, 1] = value
    tensors = {**original(), KERNEL: kernel}
    write_bundle(tmp_path / "ckpt", tensors)
    assert f"ckpt.index: tensor {KERNEL} has 1 of {F * E} values that are not finite" in load(tmp_path / "ckpt")
    torch.save(in_torch(tensors), tmp_path / "weights.pt")
    name = "bert.encoder.layer.1.output.dense.weight"
    assert f"weights.pt: tensor {name} has 1 of {F * E} values" in load(tmp_path / "weights.pt")


def test_partitioned_tensor_is_an_error(tmp_path):
    write_bundle(tmp_path / "ckpt", original(), extra=b"\x3a\x00")  # field 7, an empty TensorSliceProto
    assert "is partitioned, which is not supported" in load(tmp_path / "ckpt")


def test_compressed_index_is_an_error(tmp_path):
    write_bundle(tmp_path / "ckpt", original(), compression=1)
    assert "is compressed" in load(tmp_path / "ckpt")


def test_big_endian_checkpoint_is_an_error(tmp_path):
    write_bundle(tmp_path / "ckpt", original(), header=number(1, 1) + number(2, 1))
    assert "it is big-endian" in load(tmp_path / "ckpt")


def test_every_truncated_index_is_one_clear_error(tmp_path):
    write_bundle(tmp_path / "ckpt", {"a": np.zeros(3), "b": np.ones(2)})
    index = tmp_path / "ckpt.index"
    content = index.read_bytes()
    for size in range(len(content)):
        index.write_bytes(content[:size])
        with pytest.raises(CheckpointError, match=r"ckpt\.index: not a TensorFlow checkpoint index"):
            TensorBundle(tmp_path / "ckpt")


def test_no_flipped_byte_of_the_index_passes_or_crashes(tmp_path):
    write_bundle(tmp_path / "ckpt", {"a": np.zeros(3), "b": np.ones(2)})
    index = tmp_path / "ckpt.index"
    content, footer = index.read_bytes(), 48
    for place in range(len(content) - footer):
        index.write_bytes(content[:place] + bytes([content[place] ^ 0x55]) + content[place + 1 :])
        try:
            found = TensorBundle(tmp_path / "ckpt").entries
        except CheckpointError:
            continue
        assert sorted(found) == ["a", "b"], place  # the directory of metadata is not read


def pytorch_message(path: Path) -> str:
    message = load(path)
    assert message.startswith(f"{path}: ")
    return message


@pytest.mark.parametrize(
    "content", [b"", b"not a checkpoint", pickle.dumps(print, protocol=2)], ids=["empty", "text", "function"]
)
def test_file_that_is_none_of_pytorchs_is_an_error(content, tmp_path):
    (tmp_path / "bad.pt").write_bytes(content)
    assert "not a file of tensors that PyTorch can read" in pytorch_message(tmp_path / "bad.pt")


def test_pytorch_file_without_a_state_is_an_error(tmp_path):
    torch.save([1, 2], tmp_path / "list.pt")
    assert "holds no state of a model, but a list" in pytorch_message(tmp_path / "list.pt")


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("bert.pooler.dense.weight", None, "tensor bert.pooler.dense.weight is missing"),
        ("bert.pooler.dense.weight", torch.zeros(E, F), "has shape [8, 12], and the model needs [8, 8]"),
        ("bert.pooler.dense.weight", torch.zeros(E, E, dtype=torch.int8), "has dtype torch.int8"),
        ("cls.predictions.bias", torch.zeros(V - 1), "has shape [69], and the model needs [70]"),
        ("cls.predictions.bias", torch.zeros(V + 64), "has shape [134], and the model needs [70]"),
    ],
)
def test_wrong_tensor_of_a_pytorch_file_is_named(name, value, expected, tmp_path):
    state = {**in_torch(original()), name: value}
    torch.save({"model": state}, tmp_path / "wrong.pt")
    message = pytorch_message(tmp_path / "wrong.pt")
    assert name in message
    assert expected in message
