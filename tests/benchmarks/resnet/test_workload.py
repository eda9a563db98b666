"""ResNet-50 as a workload: how its parameters are updated, what it logs, and batch norm over several ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import mlperf_logging.compliance_checker
import pytest
import torch
import yaml
from torch import Tensor, nn

from benchmarks.resnet.evaluate import TopOne
from benchmarks.resnet.workload import ResNet
from common import cli
from common.config.composition import compose
from common.config.schema import RunConfig
from common.contract.evaluation import Weights
from common.data.batches import HostBatch
from common.distributed.layout import Layout
from common.errors import ConfigError
from common.mlperf.admission import admit
from common.mlperf.events import hyperparameters
from common.mlperf.fixed import check_fixed
from common.nn.batch_norm import BatchNorm2d
from common.ops import batch_norm as ops
from common.optim.optimizer import ParameterGroup
from common.vision import dali
from tests.conftest import checkpoint, flatten, suite
from tests.references import run_references


def composed(*overrides: str) -> RunConfig:
    """The validated configuration of ResNet under ``overrides``."""
    return cli.load(compose(["benchmark=resnet", "device=cpu", *overrides]))[0]


def groups_of(*overrides: str) -> list[ParameterGroup]:
    """The parameter groups of the whole network (width 64, 1,000 classes)."""
    run = composed("scale=1xH200", "precision=fp32", *overrides)
    return ResNet(run, Layout(run.layout)).parameter_groups()


def names(groups: list[ParameterGroup], **wanted: object) -> set[str]:
    """Names of the parameters whose group has all of ``wanted``."""
    return {
        name
        for group in groups
        if all(getattr(group, key) == value for key, value in wanted.items())
        for name in group.parameters
    }


def by_kind(groups: list[ParameterGroup]) -> tuple[set[str], set[str], set[str]]:
    """Names of the convolutions' and the classifier's weights, the classifier's bias, and batch norm's."""
    shapes = {name: parameter.ndim for group in groups for name, parameter in group.parameters.items()}
    weights = {name for name, dimensions in shapes.items() if dimensions > 1}
    return weights, {"fc.bias"}, set(shapes) - weights - {"fc.bias"}


def test_resnet_50_has_161_tensors_of_which_lars_scales_54():
    groups = groups_of()
    weights, bias, norms = by_kind(groups)
    # 53 convolutions and the classifier; 53 batch norms with weight and bias.
    assert (len(weights), len(bias), len(norms)) == (54, 1, 106)
    assert names(groups, trust_ratio=True) == weights


def test_nvidias_variant_decays_the_bias_and_keeps_the_rate_out_of_the_momentum_of_the_54_weights_alone():
    groups = groups_of("hparams.variant=nvidia", "hparams.weight_decay=0.00005")
    weights, bias, norms = by_kind(groups)
    assert names(groups, weight_decay=0.00005) == weights | bias
    assert names(groups, weight_decay=0.0) == norms
    assert names(groups, learning_rate_in_momentum=False) == weights
    assert names(groups, learning_rate_in_momentum=True) == bias | norms


def test_the_reference_decays_weights_alone_and_keeps_the_rate_in_the_momentum():
    groups = groups_of("hparams.variant=reference", "hparams.weight_decay=0.00005")
    weights, bias, norms = by_kind(groups)
    assert names(groups, weight_decay=0.00005, trust_ratio=True) == weights
    assert names(groups, weight_decay=0.0, trust_ratio=False) == bias | norms
    assert names(groups, learning_rate_in_momentum=True) == weights | bias | norms


@pytest.mark.parametrize("variant", ["nvidia", "reference"])
def test_sgd_is_the_references_in_either_variant(variant):
    # Its loss has weight_decay * sum(v ** 2), not half of it, over all variables without 'bn' in their name; Keras
    # keeps the learning rate in the momentum.
    groups = groups_of(f"hparams.variant={variant}", "hparams.optimizer=sgd", "hparams.weight_decay=0.0001")
    weights, bias, norms = by_kind(groups)
    assert names(groups, weight_decay=0.0002) == weights | bias
    assert names(groups, weight_decay=0.0) == norms
    assert names(groups, trust_ratio=True) == set()
    assert names(groups, learning_rate_in_momentum=False) == set()


def required_keys(optimizer: str) -> set[str]:
    """The hyperparameters that the compliance checker's rule files for ResNet in v4.0 want exactly once."""
    folder = Path(mlperf_logging.compliance_checker.__file__).parent / "training_4.0.0"
    found: set[str] = set()
    for file in ("closed_resnet.yaml", f"closed_resnet_{optimizer}.yaml"):
        entries = [entry["KEY"] for entry in yaml.safe_load((folder / file).read_text()) if "KEY" in entry]
        found |= {entry["NAME"] for entry in entries if entry.get("REQ") == "EXACTLY_ONE"}
    return found


@pytest.mark.parametrize(("optimizer", "count"), [("lars", 10), ("sgd", 10)])
def test_the_log_has_the_hyperparameters_of_the_rule_files(optimizer, count):
    run = composed("scale=8xH200", f"hparams.optimizer={optimizer}")
    logged = set(hyperparameters(run))
    required = required_keys(optimizer)
    assert len(required) == count
    assert required <= logged
    other = "sgd_" if optimizer == "lars" else "lars_"
    assert not [key for key in logged if key.startswith(other)]
    # gradient_accumulation_steps is a rule of every benchmark, model_bn_span of SGD's file only; the rules' table fixes
    # label_smoothing and the reference lars_eta.
    others = {"gradient_accumulation_steps", "model_bn_span", "label_smoothing", "lars_eta"}
    assert logged - required <= others


def test_nvidias_8xh200_recipe_decays_over_35_epochs_of_401_steps():
    # 1,281,167 pictures in 8 shards of 160,145, each 401 batches of 400, the last of them smaller.
    run = composed("scale=8xH200")
    values = hyperparameters(run)
    assert values["lars_opt_learning_rate_decay_steps"] == 37 * 401 - 2 * 401
    assert values["model_bn_span"] == 400
    assert values["gradient_accumulation_steps"] == 1


def decay_steps(batch: int, first_epoch: int, *overrides: str) -> object:
    """Return the decay steps that the recipe of 8 GPUs logs for 37 epochs."""
    changes = [f"hparams.global_batch_size={batch}", f"micro_batch={batch // 8}"]
    run = composed("scale=8xH200", *changes, f"benchmark.schedule.first_epoch={first_epoch}", *overrides)
    assert (run.workload.hparams.epochs, run.workload.hparams.warmup_epochs) == (37, 2)
    logged = hyperparameters(run)
    [value] = [value for key, value in logged.items() if key.endswith("_opt_learning_rate_decay_steps")]
    return value


# Epochs of 785 steps. The schedule ends on the last evaluation at or after epoch 37; one step counts as the 0th. The
# first case is the reference's convergence point, 27,476 steps.
@pytest.mark.parametrize(("first_epoch", "end"), [(1, 37), (2, 38), (3, 39), (4, 40)])
def test_the_references_schedule_ends_on_an_evaluation(first_epoch, end):
    assert decay_steps(1632, first_epoch, "hparams.variant=reference") == (end - 2) * 785 + 1


@pytest.mark.parametrize("variant", ["nvidia", "reference"])
def test_sgd_counts_steps_as_the_reference_does(variant):
    assert decay_steps(1632, 1, "hparams.optimizer=sgd", f"hparams.variant={variant}") == 27476


def test_the_references_schedule_refuses_a_first_evaluation_that_the_rules_have_not():
    with pytest.raises(ConfigError, match=r"benchmark\.schedule=.*epochs 1\.\.4, got 5"):
        decay_steps(1632, 5, "hparams.variant=reference")


def test_evaluation_runs_the_implementation_that_training_does(monkeypatch):
    run_references(
        monkeypatch, ops.BATCH_NORM, ops.BATCH_NORM_ADD_RELU, ops.BATCH_NORM_RELU_MAX_POOL, ops.BATCH_NORM_EVALUATE
    )
    run = composed("scale=test", "model.implementations.batch_norm=triton")
    workload = ResNet(run, Layout(run.layout))
    assert workload.implementations() == {"batch_norm": "triton", "convolution_moments": "reference"}
    modules = workload.evaluation(Layout(run.layout))._forward.model.modules()
    chosen = {module._evaluate.name for module in modules if isinstance(module, BatchNorm2d)}
    assert chosen == {"triton"}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("hparams.label_smoothing=0.2", "label_smoothing = 0.2 breaks the rules' table: 0 or 0.1"),
        ("hparams.lars_eta=0.01", "lars_eta = 0.01 breaks the rules' table: 0.001"),
        ("model.width=32", "model.width=32: the benchmark's model is ResNet-50 of width 64"),
    ],
)
def test_what_the_closed_division_forbids_is_refused_before_the_run(override, message):
    with pytest.raises(ConfigError, match=message):
        admit(*cli.load(compose(["benchmark=resnet", "scale=8xH200", override])))


@pytest.mark.parametrize("scale", ["1xGPU", "1xH200", "2xH200", "4xH200", "8xH200", "8xH100", "64xH100", "3584xH100"])
@pytest.mark.parametrize("override", ["hparams.label_smoothing=0", "hparams.label_smoothing=0.1"])
def test_the_recipes_for_real_data_pass_the_closed_division(scale, override):
    run = composed(f"scale={scale}", override)
    assert run.declaration.forbidden == []
    check_fixed(run.benchmark, run.declaration.forbidden)


def test_what_is_installed_is_looked_for_on_the_ranks_and_not_where_a_configuration_is_loaded(monkeypatch):
    monkeypatch.setattr(dali, "DALI", SimpleNamespace(unavailable=lambda: "it is not installed"))
    run = composed("scale=8xH200", "reader.reader=dali")
    with pytest.raises(ConfigError, match=r"^reader.reader=dali: it is not installed"):
        run.declaration.order_of_data()
    monkeypatch.setattr(dali, "DALI", SimpleNamespace(unavailable=lambda: None))
    assert run.declaration.order_of_data() == "dali, 8 shards"


def test_a_workload_declares_once_for_each_loading(monkeypatch):
    declared = []
    declare = ResNet.declare
    monkeypatch.setattr(ResNet, "declare", lambda cfg: declared.append(cfg) or declare(cfg))
    admit(*cli.load(compose(["benchmark=resnet", "device=cpu", "scale=demo"])))
    assert len(declared) == 1


def test_batch_norm_over_two_ranks_spans_their_pictures():
    run = composed("scale=8xH200", "hparams.bn_group=2")
    assert hyperparameters(run)["model_bn_span"] == 800


@pytest.mark.slow
def test_two_ranks_with_common_batch_norm_equal_one_rank_with_twice_the_micro_batch(data_of, tmp_path):
    steps, data = 2, data_of("resnet")
    for name, overrides in {
        "one": ["micro_batch=16"],
        "two": ["micro_batch=8", "scale.gpus_per_node=2", "hparams.bn_group=2"],
        "apart": ["micro_batch=8", "scale.gpus_per_node=2"],
    }.items():
        done = suite(
            "train", "benchmark=resnet", "scale=test", "device=cpu", "seed=1234", "precision=fp64",
            "benchmark.schedule.last_epoch=1", "checkpoint_every=1", "keep_checkpoints=99",
            f"data_dir={data}", f"output_dir={tmp_path / name}", *overrides,
        )  # fmt: skip
        assert done.code in (0, 10), done.errors
    single = state(tmp_path / "one", steps)
    together, apart = state(tmp_path / "two", steps), state(tmp_path / "apart", steps)
    assert largest_difference(together, single) < 1e-7
    assert largest_difference(apart, single) > 1e-3, "without common statistics the ranks must differ from one"


def state(run: Path, step: int) -> dict[str, Tensor]:
    """The optimizer's tensors after ``step``."""
    return flatten(checkpoint(run, step)["updaters"])


def largest_difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest relative difference, in norm, of two states with the same names; none of the tensors is zero."""
    assert found.keys() == expected.keys()
    differences = []
    for name, tensor in expected.items():
        assert tensor.double().norm() > 0, f"{name} is zero: nothing was learnt"
        differences.append(float((found[name] - tensor).double().norm() / tensor.double().norm()))
    return max(differences)


class Answers(nn.Module):
    """A model that answers with the class that a picture's first value says."""

    def __init__(self) -> None:
        super().__init__()
        self.offset = nn.Parameter(torch.zeros(()))

    def forward(self, image_NCHW: Tensor) -> Tensor:
        answer_N = (image_NCHW[:, 0, 0, 0] + self.offset).long() % 10
        return nn.functional.one_hot(answer_N, 10).float()


class Pictures:
    """Two batches of four, of which the last two slots are padding."""

    eval_samples = 6
    values = (1, 2, 3, 4, 5, 6, 0, 0)
    labels = (1, 2, 9, 4, 9, 6, -1, -1)

    def __len__(self) -> int:
        return 2

    def __iter__(self) -> Iterator[HostBatch]:
        for start in (0, 4):
            image_NCHW = torch.tensor(self.values[start : start + 4], dtype=torch.float32)
            label_N = torch.tensor(self.labels[start : start + 4])
            yield HostBatch({"image": image_NCHW.view(4, 1, 1, 1), "label": label_N}, 4, start // 4)

    def close(self) -> None:
        """Nothing is open."""


def test_accuracy_counts_each_picture_once_and_no_padding():
    evaluation = TopOne(Answers(), lambda root: Pictures(), torch.zeros(4, 1, 1, 1), Layout(), capture=False)  # type: ignore[arg-type]
    evaluation.warm_up()
    evaluation.open_data(Path("unused"))
    for offset, right in ((0.0, 4), (9.0, 0), (0.0, 4)):  # the second model answers one class less
        predictions = evaluation.predict(Weights({"offset": torch.tensor(offset)}))
        assert predictions.values == {"right": right, "pictures": 6, "expected": 6}
        assert evaluation.scorer.score(predictions) == {"accuracy": right / 6, "eval_samples": 6}
