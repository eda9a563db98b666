"""The base weights: transformers' files, shards, fused and separate, and every kind of bad file."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.llama2_70b_lora.base import CONFIG, INDEX, SINGLE, BaseWeights, save_base
from common.errors import CheckpointError
from common.language.architecture import LlamaArchitecture
from common.language.network import Decoder

SMALL = LlamaArchitecture(
    vocabulary=40, hidden=32, layers=2, heads=4, kv_heads=2, head_size=8, feed_forward=48, norm_epsilon=1e-5,
    rope_base=10000.0, initializer_range=0.02,
)  # fmt: skip


def seeded(name):
    return torch.Generator().manual_seed(sum(name.encode()))


def decoder():
    model = Decoder(SMALL)
    model.initialise(seeded)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            parameter.data.uniform_(0.5, 1.5, generator=seeded(name))
    return model


def weights_of(model):
    return [(name, parameter.detach()) for name, parameter in model.named_parameters()]


@pytest.fixture
def folder(tmp_path):
    """A base in several shards, QKV fused."""
    save_base(tmp_path / "base", weights_of(decoder()), SMALL, 64, shard_bytes=10_000)
    return tmp_path / "base"


def shards(folder):
    return sorted(folder.glob("model-*.safetensors"))


def rewrite(path, change):
    """Let ``change`` alter the tensors of a file."""
    tensors = dict(load_file(path))
    change(tensors)
    save_file(tensors, path)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("shard_bytes", [10_000, 1 << 30])
def test_a_saved_base_is_read_with_our_names_from_embedding_to_head(tmp_path, fused, shard_bytes):
    model = decoder()
    save_base(tmp_path, weights_of(model), SMALL, 64, fused, shard_bytes)

    found = list(BaseWeights(tmp_path, SMALL).tensors())

    sharded = shard_bytes == 10_000
    assert ((tmp_path / INDEX).exists(), (tmp_path / SINGLE).exists()) == (sharded, not sharded)
    assert (len(shards(tmp_path)) > 1) is sharded
    expected = dict(model.named_parameters())
    assert {name for name, _ in found} == set(expected)
    assert found[0][0] == "embedding.weight"
    assert [name for name, _ in found][-2:] == ["norm.weight", "head.weight"]
    layers = [name for name, _ in found if name.startswith("layers.")]
    assert layers == sorted(layers, key=lambda name: int(name.split(".")[1]))
    for name, tensor in found:
        assert torch.equal(tensor, expected[name])
    names = {n for path in tmp_path.glob("*.safetensors") for n in load_file(path)}
    assert ("model.layers.1.self_attn.qkv_proj.weight" in names) is fused
    assert ("model.layers.1.self_attn.k_proj.weight" in names) is not fused


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_weights_keep_their_dtype(tmp_path, dtype):
    save_base(tmp_path, [(name, weight.to(dtype)) for name, weight in weights_of(decoder())], SMALL, 64)

    base = BaseWeights(tmp_path, SMALL)

    assert {tensor.dtype for _, tensor in base.tensors()} == {dtype}
    assert base.bytes == 2 * SMALL.parameters


def test_transformers_reads_our_base_and_computes_the_same(tmp_path):
    transformers = pytest.importorskip("transformers")
    model = decoder()
    save_base(tmp_path, weights_of(model), SMALL, 64, fused=False, shard_bytes=10_000)

    theirs = transformers.LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()

    tokens = torch.randint(0, SMALL.vocabulary, (2, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(model.forward_logits(tokens), theirs(tokens).logits, rtol=1e-5, atol=1e-6)


def test_we_read_a_base_of_transformers_and_compute_the_same(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=40, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=48, rms_norm_eps=1e-5, max_position_embeddings=64, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    theirs = transformers.LlamaForCausalLM(config).eval()
    theirs.save_pretrained(tmp_path, max_shard_size="20KB")
    assert (tmp_path / INDEX).exists()

    model = Decoder(SMALL)
    model.load_state_dict(dict(BaseWeights(tmp_path, SMALL).tensors()))

    tokens = torch.randint(0, SMALL.vocabulary, (2, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(model.forward_logits(tokens), theirs(tokens).logits, rtol=1e-5, atol=1e-6)


def test_the_benchmark_s_base_has_as_many_parameters_as_published(tmp_path):
    """By the headers alone: 138 GB of a file that is a hole."""
    published = LlamaArchitecture(
        vocabulary=32000, hidden=8192, layers=80, heads=64, kv_heads=8, head_size=128, feed_forward=28672,
        norm_epsilon=1e-5, rope_base=10000.0, initializer_range=0.02,
    )  # fmt: skip
    shapes = {"model.embed_tokens.weight": (32000, 8192), "model.norm.weight": (8192,), "lm_head.weight": (32000, 8192)}
    for layer in range(80):
        shapes |= {
            f"model.layers.{layer}.{name}.weight": shape
            for name, shape in {
                "self_attn.qkv_proj": (10240, 8192), "self_attn.o_proj": (8192, 8192), "mlp.gate_proj": (28672, 8192),
                "mlp.up_proj": (28672, 8192), "mlp.down_proj": (8192, 28672), "input_layernorm": (8192,),
                "post_attention_layernorm": (8192,),
            }.items()
        }  # fmt: skip
    header, end = {}, 0
    for name, shape in shapes.items():
        size = 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    with open(tmp_path / SINGLE, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    (tmp_path / CONFIG).write_text("{}")

    base = BaseWeights(tmp_path, published)

    assert base.bytes == 2 * 68_976_648_192
    assert len(base.digest()) == 64


def test_the_digest_depends_on_the_weights_and_not_on_their_files(tmp_path):
    weights = weights_of(decoder())
    other = [(name, weight.clone()) for name, weight in weights]
    other[3][1].view(-1)[0] += 1
    digests = {}
    for name, given, size in (("one", weights, 10_000), ("two", weights, 1 << 30), ("three", other, 1 << 30)):
        save_base(tmp_path / name, given, SMALL, 64, shard_bytes=size)
        digests[name] = BaseWeights(tmp_path / name, SMALL).digest()

    assert digests["one"] == digests["two"]
    assert digests["one"] != digests["three"]


def test_a_missing_shard_is_named_with_a_tensor_of_it(folder):
    path = shards(folder)[1]
    index = json.loads((folder / INDEX).read_text())["weight_map"]
    lost = [name for name, file in index.items() if file == path.name]
    path.unlink()

    with pytest.raises(CheckpointError, match=rf"{path.name} is missing though .*{lost[0]}"):
        BaseWeights(folder, SMALL)


def test_a_shard_that_is_cut_off_is_named(folder):
    path = shards(folder)[1]
    path.write_bytes(path.read_bytes()[:-1])

    with pytest.raises(CheckpointError, match=rf"{path.name} is cut off"):
        BaseWeights(folder, SMALL)


@pytest.mark.parametrize(
    "content",
    [
        b"", b"short", b"\xff" * 16, (5).to_bytes(8, "little") + b"[1,2]", (9).to_bytes(8, "little") + b"{}",
        (70).to_bytes(8, "little") + b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}'.ljust(74),
        (70).to_bytes(8, "little") + b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [4, 0]}}'.ljust(70),
    ],
    ids=["empty", "short", "huge header", "list", "header cut off", "other size", "negative shape"],
)  # fmt: skip
def test_a_file_that_is_no_safetensors_is_named(folder, content):
    path = shards(folder)[0]
    path.write_bytes(content)

    with pytest.raises(CheckpointError, match=path.name):
        BaseWeights(folder, SMALL)


def test_a_tensor_that_a_shard_lacks_is_named(folder):
    path = shards(folder)[0]
    lost = sorted(load_file(path))[0]
    rewrite(path, lambda tensors: tensors.pop(lost) if len(tensors) > 1 else tensors.update({"x": tensors.pop(lost)}))

    with pytest.raises(CheckpointError, match=rf"{path.name}: tensor {lost} is missing though"):
        BaseWeights(folder, SMALL)


def test_a_tensor_that_nothing_names_is_missing(tmp_path):
    save_base(tmp_path, weights_of(decoder()), SMALL, 64)
    rewrite(tmp_path / SINGLE, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))

    with pytest.raises(CheckpointError, match=r"tensors: tensor model\.layers\.1\.mlp\.up_proj\.weight is missing"):
        BaseWeights(tmp_path, SMALL)


def test_another_shape_is_named_with_both(tmp_path):
    save_base(tmp_path, weights_of(decoder()), SMALL, 64)
    name = "model.layers.0.self_attn.o_proj.weight"
    rewrite(tmp_path / SINGLE, lambda tensors: tensors.update({name: torch.zeros(32, 31)}))

    with pytest.raises(CheckpointError, match=rf"{SINGLE}: tensor {name} has shape \[32, 31\], .* needs \[32, 32\]"):
        BaseWeights(tmp_path, SMALL)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float64])
def test_another_dtype_is_named(tmp_path, dtype):
    save_base(tmp_path, weights_of(decoder()), SMALL, 64)
    rewrite(tmp_path / SINGLE, lambda tensors: tensors.update({"lm_head.weight": torch.zeros(40, 32, dtype=dtype)}))

    with pytest.raises(CheckpointError, match=r"lm_head\.weight has dtype"):
        BaseWeights(tmp_path, SMALL)


def test_an_unknown_tensor_is_an_error_except_the_constant_of_the_rotation(tmp_path):
    save_base(tmp_path, weights_of(decoder()), SMALL, 64)
    constant = "model.layers.0.self_attn.rotary_emb.inv_freq"
    rewrite(tmp_path / SINGLE, lambda tensors: tensors.update({constant: torch.ones(4)}))
    assert len(list(BaseWeights(tmp_path, SMALL).tensors())) == 15

    rewrite(
        tmp_path / SINGLE, lambda tensors: tensors.update({"model.layers.2.input_layernorm.weight": torch.ones(32)})
    )
    with pytest.raises(CheckpointError, match=r"no tensor model\.layers\.2\.input_layernorm\.weight"):
        BaseWeights(tmp_path, SMALL)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_attention_heads", 8),
        ("num_key_value_heads", 4),
        ("rms_norm_eps", 1e-6),
        ("rope_theta", 500000.0),
        ("rope_parameters", {"rope_type": "llama3", "rope_theta": 10000.0}),
        ("rope_scaling", {"type": "linear", "factor": 2.0}),
        ("tie_word_embeddings", True),
        ("hidden_act", "gelu"),
    ],
)
def test_a_config_of_another_model_is_refused_though_shapes_agree(folder, key, value):
    content = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps({**content, key: value}))

    with pytest.raises(CheckpointError, match=r"config\.json: .*the model has"):
        BaseWeights(folder, SMALL)


@pytest.mark.parametrize("content", ["[]", "{", None])
def test_a_damaged_or_missing_config_is_named(folder, content):
    if content is None:
        (folder / CONFIG).unlink()
    else:
        (folder / CONFIG).write_text(content)

    with pytest.raises(CheckpointError, match=r"config\.json is (damaged|missing)"):
        BaseWeights(folder, SMALL)


@pytest.mark.parametrize(
    "content",
    ["{", "{}", '{"weight_map": {}}', '{"weight_map": {"a": 1}}', '{"weight_map": {"a": "../b.safetensors"}}'],
)
def test_a_damaged_index_is_named(folder, content):
    (folder / INDEX).write_text(content)

    with pytest.raises(CheckpointError, match=r"index\.json is damaged"):
        BaseWeights(folder, SMALL)


def test_an_empty_folder_is_no_base(tmp_path):
    with pytest.raises(CheckpointError, match="holds no base weights"):
        BaseWeights(tmp_path, SMALL)


def test_a_base_is_written_whole_and_of_one_kind_or_not_at_all(tmp_path):
    weights = weights_of(decoder())
    with pytest.raises(CheckpointError, match=r"head\.weight were not given"):
        save_base(tmp_path / "a", weights[:-1], SMALL, 64)
    with pytest.raises(CheckpointError, match="there is none of that name"):
        save_base(tmp_path / "b", [*weights, ("extra", torch.ones(1))], SMALL, 64)
    with pytest.raises(CheckpointError, match="it has shape"):
        save_base(tmp_path / "c", [(weights[0][0], torch.ones(3)), *weights[1:]], SMALL, 64)
    with pytest.raises(CheckpointError, match="has one dtype"):
        save_base(tmp_path / "d", [(weights[0][0], weights[0][1].bfloat16()), *weights[1:]], SMALL, 64)
    assert not list(tmp_path.glob("*/*.safetensors"))
