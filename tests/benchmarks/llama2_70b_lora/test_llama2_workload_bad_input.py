"""Mistakes with Llama-2 LoRA end in one message that names key, value and remedy."""

from __future__ import annotations

import pytest

from benchmarks.llama2_70b_lora.workload import LlamaLora
from common import cli
from common.config.composition import compose
from common.config.schema import RunConfig
from common.distributed.layout import Layout
from common.errors import CheckpointError, ConfigError, UnsupportedImplementation
from common.mlperf.admission import admit


def composed(*overrides: str) -> RunConfig:
    """The configuration of the ``test`` recipe, as far as it is checked before any rank starts."""
    run, session = cli.load(compose(["benchmark=llama2_70b_lora", "scale=test", "device=cpu", *overrides]))
    admit(run, session)
    return run


def built(*overrides: str) -> LlamaLora:
    """The workload of that configuration, on the first of its ranks."""
    cfg = composed(*overrides)
    return LlamaLora(cfg, Layout(cfg.layout))


@pytest.fixture
def no_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layouts of several ranks can be made in this process; their groups cannot be used."""
    alone = Layout.group

    def group(self: Layout, *axes: str) -> object:
        return alone(self, *axes) if self.size(*axes) == 1 else object()

    monkeypatch.setattr(Layout, "group", group)


REFUSED = {
    "model.linear=fp8 model.blocks=autograd": r"model\.linear=fp8: only frozen blocks .* model\.blocks=frozen",
    "model.linear=te model.blocks=autograd": r"model\.linear=te: only frozen blocks .* model\.blocks=frozen",
    "model.blocks=torch": "model.blocks=torch: expected one of frozen, autograd",
    "model.linear=int8": "model.linear=int8: expected one of torch, fp8",
    "model.layers=-1": "model.layers=-1: finite and not negative",
    "model.head_chunk=0": "model.head_chunk=0: at least 1",
    "model.recomputed_qkv=-1": "model.recomputed_qkv=-1",
    "model.recomputed_qkv=1 model.blocks=autograd": "model.recomputed_qkv=1: only frozen blocks .* as well",
    "model.transposed_layers=1 model.linear=torch": "model.transposed_layers=1: only FP8 weights .* as well",
    "reader.eval_rows=0": "reader.eval_rows=0: at least 1",
    "hparams.training_steps=0": "hparams.training_steps=0: at least 1",
    "hparams.warmup_ratio=1.0": "hparams.warmup_ratio=1.0",
    "hparams.warmup_ratio=0.99": "hparams.warmup_ratio=0.99: rounded to steps it is all of training_steps=16",
    "hparams.base_learning_rate=0": "hparams.base_learning_rate=0.0: positive and finite",
    "hparams.optimizer=sgd": "hparams.optimizer=sgd: expected one of adamw",
    "benchmark.facts.kv_heads=3": "benchmark.facts.kv_heads=3: a divisor of heads=4",
    "benchmark.facts.head_size=7": "benchmark.facts.head_size=7: an even number",
    "benchmark.facts.lora_dropout=1.0": "benchmark.facts.lora_dropout=1.0",
    "benchmark.facts.row_length=1": "benchmark.facts.row_length=1: at least 2",
    "benchmark.facts.lora_rank=0": "benchmark.facts.lora_rank=0: at least 1",
    "benchmark.facts.max_grad_norm=0": "benchmark.facts.max_grad_norm=0.0: positive",
}


@pytest.mark.parametrize("overrides", list(REFUSED))
def test_a_value_that_cannot_be_meant_is_refused_before_any_rank_starts(overrides):
    with pytest.raises(ConfigError, match=REFUSED[overrides]):
        composed(*overrides.split())


def test_more_layers_than_the_base_has_are_refused():
    with pytest.raises(ConfigError, match=r"model\.layers=3: the base has 2; 0 uses all"):
        built("model.layers=3")


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("layout.cp=3", r"layout\.cp=3 deals a row in 6 equal chunks, which a row of 64 tokens does not give"),
        ("layout.tp=3", r"layout\.tp=3 does not divide the 4 heads"),
        ("layout.tp=4", r"layout\.tp=4 does not divide the 2 key/value heads"),
        ("layout.pp=2", r"layout\.pp=2: Llama 2's ranks .* use 1"),
    ],
)
def test_ranks_that_cannot_share_the_network_are_refused(layout, message, no_groups):
    ranks = layout.rpartition("=")[2]
    with pytest.raises(ConfigError, match=message):
        built(layout, f"scale.gpus_per_node={ranks}")


@pytest.mark.parametrize(
    "choice", ["attention=cudnn", "rms_norm=triton", "rope=triton", "swiglu=triton", "lora_input=triton"]
)
def test_an_implementation_that_does_not_run_here_is_named(choice):
    with pytest.raises(UnsupportedImplementation, match=rf"^model\.implementations\.{choice}: "):
        built(f"model.implementations.{choice}")


def test_assets_without_a_base_are_refused_with_the_command_that_says_where_it_is(tmp_path):
    with pytest.raises(CheckpointError, match=rf"{tmp_path}/base holds no base weights: .* benchmark=llama2_70b_lora"):
        built(f"assets_dir={tmp_path}")


@pytest.mark.parametrize(
    ("fact", "key"),
    [("vocabulary=512", "vocab_size 384"), ("hidden=64", "hidden_size 32"), ("layers=3", "num_hidden_layers 2"),
     ("norm_epsilon=1e-6", "rms_norm_eps")],
)  # fmt: skip
def test_the_base_of_another_network_is_refused(fact, key, data_of):
    with pytest.raises(CheckpointError, match=key):
        built(f"assets_dir={data_of('llama2_70b_lora')}-assets", f"benchmark.facts.{fact}")


def test_a_damaged_base_is_refused(data_of, tmp_path):
    stored = data_of("llama2_70b_lora").with_name("data-assets") / "base"
    (tmp_path / "base").mkdir()
    for path in stored.iterdir():
        content = path.read_bytes()
        (tmp_path / "base" / path.name).write_bytes(content[:-8] if path.suffix == ".safetensors" else content)
    with pytest.raises(CheckpointError, match=r"\.safetensors"):
        built(f"assets_dir={tmp_path}")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ((), r"model\.linear=fp8: FP8 products are of fp16 and bf16 tensors"),
        (
            ("precision=bf16", "benchmark.facts.feed_forward=40"),
            r"model\.linear=fp8: 40 columns are not a multiple of 16",
        ),
        (
            ("precision=bf16", "benchmark.facts.row_length=60"),
            r"model\.linear=fp8: a product of 120 tokens",
        ),
    ],
)
def test_products_that_cannot_be_in_fp8_are_refused_before_any_weight_is_read(overrides, message, tmp_path):
    with pytest.raises(UnsupportedImplementation, match=message):
        built("model.linear=fp8", f"assets_dir={tmp_path}", *overrides)


def test_transformer_engine_is_refused_without_a_gpu(tmp_path):
    with pytest.raises(UnsupportedImplementation, match=r"model\.linear=te: .* needs a CUDA device, not cpu"):
        built("model.linear=te", f"assets_dir={tmp_path}")
