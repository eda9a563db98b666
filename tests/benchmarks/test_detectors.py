"""SSD300, RetinaNet and Mask R-CNN as workloads: backbone, operations, reader and scorer."""

from __future__ import annotations

import math
import pickle
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from benchmarks.maskrcnn.workload import MaskRCNNSegmentation
from benchmarks.retinanet.workload import RetinaNetDetection
from benchmarks.ssd300.workload import Ssd300Detection
from common import cli
from common.config.composition import CONFIGS, compose
from common.config.schema import RunConfig, SessionConfig
from common.distributed.layout import Layout
from common.errors import CheckpointError, ConfigError, UnsupportedImplementation
from common.evaluation.forward import evaluating
from common.mlperf.admission import admit
from tests.capturable import Capturable
from tests.command_line import logged, training
from tests.conftest import suite

WORKLOADS = {"ssd300": Ssd300Detection, "retinanet": RetinaNetDetection, "maskrcnn": MaskRCNNSegmentation}
BACKBONES = {
    "ssd300": "torchvision's resnet34-333f7ec4.pth",
    "retinanet": "torchvision's resnext50_32x4d-7cdf4587.pth",
    "maskrcnn": "the rules' R-50.pkl",
}
OPERATIONS = {name: import_module(f"benchmarks.{name}.config").OPERATIONS for name in WORKLOADS}
PLACE = ("file", "lineno")
MEASURED = ("tracked_stats",)
each = pytest.mark.parametrize("name", WORKLOADS)


def loaded(name: str, *overrides: str) -> tuple[RunConfig, SessionConfig]:
    return cli.load(compose([f"benchmark={name}", "device=cpu", *overrides]))


def built(name: str, *overrides: str) -> Any:
    """Return the workload of the ``test`` recipe, on one rank."""
    run, _ = loaded(name, "scale=test", *overrides)
    return WORKLOADS[name](run, Layout(run.layout, seed=3))


@each
def test_the_closed_division_starts_from_the_rules_backbone(name, tmp_path):
    with pytest.raises(ConfigError, match=f"assets_dir=null: training starts from {BACKBONES[name]}, in assets_dir"):
        admit(*loaded(name, "scale=8xH200"))
    with pytest.raises(ConfigError, match=f"model.backbone=other.pth: training starts from {BACKBONES[name]}"):
        admit(*loaded(name, "scale=8xH200", f"assets_dir={tmp_path}", "model.backbone=other.pth"))


@each
def test_initial_weights_depend_on_the_seed_alone(name):
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        found.append(built(name).model.parameters())
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


@pytest.mark.parametrize(
    ("name", "scale"),
    [
        *(("ssd300", scale) for scale in ("8xH200", "8xH100", "64xH100", "1024xA100")),
        *(("retinanet", scale) for scale in ("8xH200", "8xH100", "64xH100", "2048xH100", "2528xH100")),
    ],
)
def test_the_sum_of_all_ranks_gradients_stays_in_the_range_of_fp16(name, scale):
    run, _ = loaded(name, f"scale={scale}")
    assert run.precision == "fp16"
    assert run.training_ranks / 2 < run.optimizer.grad_predivide <= run.training_ranks
    assert math.log2(run.optimizer.grad_predivide).is_integer()  # loses no bit


@each
def test_a_missing_backbone_is_named(name):
    with pytest.raises(CheckpointError, match=r"^/nowhere/"):
        built(name, "assets_dir=/nowhere")


@each
def test_implementations_are_logged(name):
    workload = built(name, "model.implementations.suppression=reference")
    workload.evaluation(Layout())
    assert OPERATIONS[name].keys() <= workload.implementations().keys()


@pytest.mark.parametrize(("name", "option"), [(name, option) for name in WORKLOADS for option in OPERATIONS[name]])
def test_the_error_for_an_unsupported_implementation_names_its_option(name, option, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    request = f"model.implementations.{option}={next(iter(OPERATIONS[name][option].fast))}"
    with pytest.raises(UnsupportedImplementation, match=f"^{request}"):
        built(name, request).evaluation(Layout())


@each
def test_a_checkpoint_of_one_reader_can_be_resumed_with_the_other(name):
    declared = [loaded(name, "scale=test", f"reader.reader={kind}")[0].declaration for kind in ("dali", "torchvision")]
    assert declared[0].order_of_data() == declared[1].order_of_data()


@each
@pytest.mark.parametrize(("scoring", "device"), [("background", "cpu"), ("inline", "meta")])
def test_background_scoring_runs_on_the_cpu(name, scoring, device):
    scorer = built(name, f"evaluation.scoring={scoring}").evaluation(Layout(device="meta")).scorer
    assert pickle.loads(pickle.dumps(scorer))._device == torch.device(device)


@pytest.mark.parametrize("name", ["ssd300", "retinanet"])
def test_above_64_gpus_no_rank_waits_for_a_score(name):
    recipe = yaml.safe_load((CONFIGS / "recipe" / f"{name}.yaml").read_text())
    modes = {}
    for scale in (scale for scale in recipe["scales"] if scale[0].isdigit()):
        run, _ = loaded(name, f"scale={scale}")
        modes.setdefault(run.training_ranks > 64, set()).add(run.evaluation.scoring)
    assert modes == {False: {"inline"}, True: {"background"}}


def logged_events(log: Path) -> list[tuple[str, str, str]]:
    """Return key, value and metadata of every line of a log but those with measured times, sorted."""
    return sorted(
        (event["key"], repr(event["value"]), repr({k: v for k, v in event["metadata"].items() if k not in PLACE}))
        for event in logged(log)
        if event["key"] not in MEASURED
    )


@pytest.mark.slow_cases("ssd300")
@pytest.mark.parametrize("name", ["ssd300", "retinanet"])
def test_background_scoring_logs_the_lines_of_inline_scoring(name, data_of, tmp_path):
    data = data_of(name)
    for scoring in ("inline", "background"):
        overrides = ["scale.gpus_per_node=2", f"evaluation.scoring={scoring}", f"assets_dir={data}-assets"]
        done = suite(*training(data, tmp_path / scoring, *overrides, benchmark=name))
        assert done.code == 10, done.errors
    inline, background = (logged_events(tmp_path / scoring / "mlperf.log") for scoring in ("inline", "background"))
    assert len([key for key, _, _ in inline if key == "eval_accuracy"]) == 2
    assert background == inline


@pytest.mark.parametrize("name", ["ssd300", "retinanet"])
def test_an_evaluation_can_be_captured(name):
    workload = built(name)
    (forward,) = workload.evaluation(workload.layout)._forward.values()
    forward.warm_up()
    with evaluating(workload.model, workload.weights()), Capturable():
        forward()
