"""Llama-2 LoRA as a workload: published recipes, what is trained, and what the rules fix."""

from __future__ import annotations

import itertools
import json
from importlib import resources

import pytest
import torch

from benchmarks.llama2_70b_lora.workload import LlamaLora
from common import cli
from common.config.composition import compose
from common.config.schema import RunConfig
from common.distributed.layout import Layout
from common.errors import CheckpointError, ConfigError, UnsupportedImplementation
from common.language.network import Decoder
from common.mlperf.admission import admit, evaluation_schedule
from common.mlperf.events import hyperparameters
from common.nn.frozen import frozen_names
from tests.benchmarks.recipes import recipes_of

loaded, built = recipes_of("llama2_70b_lora", LlamaLora)


# NVIDIA's configurations in the results of MLPerf Training v4.1: GPUs, tp, cp, micro-batches of a step; global batch,
# learning rate, steps of the cosine.
PUBLISHED = {
    "8xH200": (8, 1, 2, 2, 8, 5e-4, 896),
    "8xH100": (8, 4, 1, 4, 8, 4e-4, 800),
    "64xH100": (64, 4, 2, 1, 8, 4e-4, 1024),
    "1024xH100": (1024, 4, 2, 1, 128, 6e-4, 1024),
}


@pytest.mark.parametrize("scale", list(PUBLISHED))
def test_a_recipe_has_the_published_layout_and_hyperparameters(scale, tmp_path):
    ranks, tp, cp, accumulated, batch, rate, steps = PUBLISHED[scale]
    run, session = loaded(f"scale={scale}", f"assets_dir={tmp_path}", "ruleset=6.1.0")
    logged = admit(run, session).hyperparameters
    assert (run.world_size, run.layout["tp"], run.layout["cp"]) == (ranks, tp, cp)
    assert (run.micro_batch, run.precision, run.workload.model.linear) == (1, "bf16", "fp8")
    assert (logged["global_batch_size"], logged["gradient_accumulation_steps"]) == (batch, accumulated)
    assert logged["opt_base_learning_rate"] == rate
    assert logged["opt_learning_rate_training_steps"] == steps
    assert logged["opt_learning_rate_warmup_factor"] == 0
    assert logged["lowest_numerical_precision_in_linear"] == "fp8"
    assert logged["lowest_numerical_precision_in_attn"] == "bfloat16"
    assert logged["lowest_numerical_precision_in_comm"] == ("fp8" if tp > 1 else "bfloat16")
    assert (logged["tensor_parallelism"], logged["context_parallelism"]) == (tp, cp)
    assert evaluation_schedule(run).last == steps * batch


@pytest.mark.parametrize("scale", [*PUBLISHED, "1xH200", "2xH200", "4xH200", "1xGPU"])
def test_every_recipe_keeps_what_the_rules_fix(scale):
    run, _ = loaded(f"scale={scale}")
    logged = hyperparameters(run)
    assert (logged["lora_rank"], logged["lora_alpha"]) == (16, 32)
    assert (logged["opt_gradient_clip_norm"], logged["opt_adamw_weight_decay"]) == (0.3, 1e-4)
    assert (logged["global_batch_size"] == 8) == (scale != "1024xH100")
    own = run.workload
    assert (own.facts.lora_dropout, own.facts.row_length) == (0.1, 8192)
    assert (own.hparams.beta_1, own.hparams.beta_2, own.hparams.epsilon) == (0.9, 0.999, 1e-8)
    assert (run.benchmark.train_samples, run.benchmark.eval_samples, run.benchmark.targets["eval_loss"].value) == (
        3901,
        173,
        0.925,
    )


def test_the_reference_points_of_mlcommons_can_be_run():
    package = resources.files("mlperf_logging.rcp_checker")
    points = json.loads((package / "training_5.1.0" / "rcps_llama2_70b_lora.json").read_text())
    found = set()
    for point in points.values():
        run, _ = loaded("scale=8xH200", f"hparams=llama2_70b_lora/rcp_{point['BS']}")
        own, logged, reference = run.workload, hyperparameters(run), point["Hyperparams"]
        assert logged["global_batch_size"] == point["BS"]
        assert own.hparams.base_learning_rate == reference["opt_base_learning_rate"]
        assert own.hparams.training_steps == reference["max_steps"]
        assert own.hparams.warmup_ratio == reference["opt_learning_rate_warmup_epochs"] == 0
        assert own.facts.max_grad_norm == reference["opt_max_grad_norm"]
        assert (own.facts.lora_rank, own.facts.lora_alpha) == (reference["lora_r"], reference["lora_alpha"])
        found.add(point["BS"])
    assert found == {8, 16, 32, 128}


# The rules: every ceil(384 / batch) steps, without the first floor(0.125 * batch + 2) evaluations.
FIRST = {8: (1536, 1920), 16: (1920, 2304), 32: (2688, 3072), 36: (2772, 3168), 64: (4224, 4608), 128: (7296, 7680)}


@pytest.mark.parametrize("batch", list(FIRST))
def test_the_first_evaluations_are_those_of_the_rules(batch):
    run, _ = loaded("scale=8xH200", f"hparams.global_batch_size={batch}")
    assert tuple(itertools.islice(evaluation_schedule(run).points(), 2)) == FIRST[batch]


def test_the_closed_division_starts_from_all_of_the_rules_base(tmp_path):
    stored = f"assets_dir={tmp_path}"
    with pytest.raises(ConfigError, match="assets_dir=null: training starts from the rules' base"):
        admit(*loaded("scale=8xH200"))
    with pytest.raises(ConfigError, match="layers=16: the base has 80"):
        admit(*loaded("scale=8xH200", stored, "model.layers=16"))
    for given in ([], ["model.layers=80"]):
        admit(*loaded("scale=8xH200", stored, *given))
    admit(*loaded("scale=8xH200", "submission.division=open", "model.layers=16"))


@pytest.mark.parametrize(
    "override",
    [
        "benchmark.facts.lora_dropout=0.0", "benchmark.facts.lora_rank=8", "benchmark.facts.lora_alpha=16.0",
        "benchmark.facts.max_grad_norm=1.0", "benchmark.facts.layers=40", "benchmark.facts.row_length=4096",
        "benchmark.facts.rope_base=500000.0",
    ],
)  # fmt: skip
def test_the_closed_division_fixes_the_model_and_its_adapters(override, tmp_path):
    key, _, value = override.rpartition(".facts.")[2].partition("=")
    with pytest.raises(ConfigError, match=rf"{key}.*{value.removesuffix('.0')}"):
        admit(*loaded("scale=8xH200", f"assets_dir={tmp_path}", override))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("hparams.weight_decay=0.1", "opt_adamw_weight_decay = 0.1 breaks the rules' table: 0.0001"),
        ("hparams.beta_1=0.95", "opt_adamw_beta_1 = 0.95 breaks the rules' table: 0.9, as in the reference"),
        ("hparams.beta_2=0.95", "opt_adamw_beta_2 = 0.95 breaks the rules' table: 0.999, as in the reference"),
        ("hparams.epsilon=1e-5", "opt_adamw_epsilon = 1e-05 breaks the rules' table: 1e-08, as in the reference"),
    ],
)
def test_the_closed_division_fixes_the_optimizer(override, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        admit(*loaded("scale=8xH200", f"assets_dir={tmp_path}", override))


def test_the_real_network_has_as_many_weights_as_the_rules_say():
    run, _ = loaded("scale=8xH200")
    facts = run.workload.facts
    model = Decoder(facts, "meta", lora=facts.lora)
    adapters = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    everything = sum(parameter.numel() for parameter in model.parameters())
    assert adapters == 44_564_480
    assert everything - adapters == facts.parameters == 68_976_648_192


def test_adapters_are_trained_with_decay_and_nothing_else():
    workload = built()
    (group,) = workload.parameter_groups()
    adapters = {f"layers.{layer}.{product}.lora_{m}" for layer in (0, 1) for product in ("qkv", "output") for m in "ab"}
    assert set(group.parameters) == adapters
    assert group.weight_decay == 1e-4
    everything = {name for name, _ in workload.model.named_parameters()}
    assert frozen_names(workload.model) == everything - adapters
    assert {name for name, _ in workload.named_state()} == adapters


def test_adapters_begin_without_effect_and_only_b_has_a_first_gradient():
    workload = built()
    workload.loss(next(iter(workload.example_batches()))).total.backward()
    for name, parameter in workload.model.named_parameters():
        if name.endswith(".lora_b"):
            assert not parameter.any()
            assert parameter.grad.any(), name
        elif name.endswith(".lora_a"):
            # Kaiming's uniform distribution with a = sqrt(5): a bound of sqrt(6 / (1 + 5) / columns)
            bound = parameter.shape[1] ** -0.5
            assert 0.9 * bound < float(parameter.detach().abs().max()) <= bound
            assert not parameter.grad.any(), name
        else:
            assert parameter.grad is None


def test_with_a_base_the_seed_changes_only_the_adapters(data_of):
    given = [f"assets_dir={data_of('llama2_70b_lora')}-assets"]
    run, _ = loaded("scale=test", *given)
    one, other = (dict(LlamaLora(run, Layout(run.layout, seed=seed)).model.named_parameters()) for seed in (1, 2))
    differ = {name for name, tensor in one.items() if not torch.equal(tensor, other[name])}
    assert differ == {name for name in one if name.endswith(".lora_a")}


def test_the_first_layers_of_a_base_can_run_alone(data_of):
    given = f"assets_dir={data_of('llama2_70b_lora')}-assets"
    whole, part = (dict(built(given, f"model.layers={layers}").model.named_parameters()) for layers in (0, 1))
    assert {name for name in whole if not name.startswith("layers.1.")} == set(part)
    assert all(torch.equal(tensor, whole[name]) for name, tensor in part.items())


def test_a_row_costs_what_the_rules_network_costs():
    # 4 N s of the frozen products, N without the embedding and the norms, three times the causal half of the
    # attention's 4 s^2 E, and 6 s of the adapters.
    run, _ = loaded("scale=8xH200")
    s, products = 8192, 80 * 855_638_016 + 262_144_000
    attention = 80 * 2 * s * s * 8192
    expected = 4 * products * s + 3 * attention + 6 * s * 44_564_480
    workload = object.__new__(LlamaLora)
    workload.own, workload.architecture = run.workload, run.workload.facts
    assert workload.sample_flops() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("evaluating_ranks", "role", "tokens", "eval_tokens"),
    [(0, "train", 2 * 64, 3 * 64), (1, "train", 2 * 64, 0), (1, "evaluate", 0, 3 * 64)],
)
def test_the_memory_plan_depends_on_the_role_of_the_rank(evaluating_ranks, role, tokens, eval_tokens):
    ranks = [f"scale.gpus_per_node={1 + evaluating_ranks}", f"evaluation.ranks={evaluating_ranks}"]
    run, _ = loaded("scale=test", "reader.eval_rows=3", *ranks)
    workload = LlamaLora(run, Layout(role=role))
    assert (workload.workspace.tokens, workload.workspace.eval_tokens) == (tokens, eval_tokens)


def test_the_configured_number_of_layers_keeps_transposed_weights():
    workload = built("precision=bf16", "model.linear=fp8", "model.transposed_layers=1")
    first, second = (layer.attention.qkv for layer in workload.stage.network.layers[0])
    assert torch.equal(first._transposed_IO.float(), first.weight.float().t())
    assert second._transposed_IO is None


def test_an_evaluation_is_given_the_scales_that_rest_in_it():
    """Ranks that evaluate never train: without these every product there would look for a scale of its own."""
    trained, other = (built("precision=bf16", "model.linear=fp8") for _ in range(2))
    for batch in trained.example_batches():
        trained.loss(batch).total.backward()
    given = trained.weights().tensors
    scales = {name: scale for name, scale in given.items() if "scale" in name}
    assert all((scale > 0).all() for scale in scales.values())
    assert scales.keys() == {name for name, buffer in other.model.named_buffers() if buffer.dtype == torch.float32}
    assert not frozen_names(trained.model) & given.keys()
    assert all(
        given[name].data_ptr() == buffer.data_ptr() for name, buffer in trained.model.named_buffers() if name in given
    )


def test_a_larger_batch_of_the_evaluation_moves_nothing_that_a_graph_has_seen():
    workload = built("precision=bf16", "model.linear=fp8", "reader.eval_rows=2", "micro_batch=1")
    scratch = workload.stage.network._shared.scratch
    shape = (64, 2 * 64)
    before = scratch.mlp(shape, torch.bfloat16).data_ptr()
    workload.evaluation(workload.layout).warm_up()
    assert scratch.mlp(shape, torch.bfloat16).data_ptr() == before


def composed(*overrides: str) -> RunConfig:
    """The configuration of the ``test`` recipe, as far as it is checked before any rank starts."""
    run, session = cli.load(compose(["benchmark=llama2_70b_lora", "scale=test", "device=cpu", *overrides]))
    admit(run, session)
    return run


def admitted(*overrides: str) -> LlamaLora:
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
        admitted("model.layers=3")


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("layout.cp=3", r"layout\.cp=3 splits a row into 6 equal chunks, and a row of 64 tokens is not a multiple"),
        ("layout.tp=3", r"layout\.tp=3 does not divide the 4 heads"),
        ("layout.tp=4", r"layout\.tp=4 does not divide the 2 key/value heads"),
        ("layout.pp=2", r"layout\.pp=2: Llama 2's ranks .* use 1"),
    ],
)
def test_ranks_that_cannot_share_the_network_are_refused(layout, message, no_groups):
    ranks = layout.rpartition("=")[2]
    with pytest.raises(ConfigError, match=message):
        admitted(layout, f"scale.gpus_per_node={ranks}")


@pytest.mark.parametrize(
    "choice", ["attention=cudnn", "rms_norm=triton", "rope=triton", "swiglu=triton", "lora_input=triton"]
)
def test_an_implementation_that_does_not_run_here_is_named(choice):
    with pytest.raises(UnsupportedImplementation, match=rf"^model\.implementations\.{choice}: "):
        admitted(f"model.implementations.{choice}")


def test_assets_without_a_base_are_an_error_that_names_the_command(tmp_path):
    with pytest.raises(CheckpointError, match=rf"{tmp_path}/base holds no base weights: .* benchmark=llama2_70b_lora"):
        admitted(f"assets_dir={tmp_path}")


@pytest.mark.parametrize(
    ("fact", "key"),
    [("vocabulary=512", "vocab_size 384"), ("hidden=64", "hidden_size 32"), ("layers=3", "num_hidden_layers 2"),
     ("norm_epsilon=1e-6", "rms_norm_eps")],
)  # fmt: skip
def test_the_base_of_another_network_is_refused(fact, key, data_of):
    with pytest.raises(CheckpointError, match=key):
        admitted(f"assets_dir={data_of('llama2_70b_lora')}-assets", f"benchmark.facts.{fact}")


def test_a_damaged_base_is_refused(data_of, tmp_path):
    stored = data_of("llama2_70b_lora").with_name("data-assets") / "base"
    (tmp_path / "base").mkdir()
    for path in stored.iterdir():
        content = path.read_bytes()
        (tmp_path / "base" / path.name).write_bytes(content[:-8] if path.suffix == ".safetensors" else content)
    with pytest.raises(CheckpointError, match=r"\.safetensors"):
        admitted(f"assets_dir={tmp_path}")


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
        admitted("model.linear=fp8", f"assets_dir={tmp_path}", *overrides)


def test_transformer_engine_is_refused_without_a_gpu(tmp_path):
    with pytest.raises(UnsupportedImplementation, match=r"model\.linear=te: .* needs a CUDA device, not cpu"):
        admitted("model.linear=te", f"assets_dir={tmp_path}")
