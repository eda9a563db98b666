"""Mask R-CNN as a workload: connects model, data, optimizer and evaluation."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from benchmarks.maskrcnn.caffe2_backbone import BACKBONE, load_backbone
from benchmarks.maskrcnn.config import MaskRCNNConfig
from benchmarks.maskrcnn.data import MaskData
from benchmarks.maskrcnn.evaluate import evaluation, ground_truth
from benchmarks.maskrcnn.iteration import TrainingPass
from benchmarks.maskrcnn.model import MaskRCNN
from benchmarks.maskrcnn.pictures import Preparer, Shape
from benchmarks.maskrcnn.polygon_table import PolygonTable
from benchmarks.maskrcnn.prepared import FORMAT, open_prepared
from benchmarks.maskrcnn.schedule import learning_rate, parameter_groups
from common.config.schema import Declaration, RunConfig
from common.data.batches import Batch, DataSource, HostBatch
from common.detection.coco_scorer import MaskScorer
from common.detection.detection_workload import DetectionWorkload
from common.detection.evaluation import DetectionEvaluation
from common.distributed.layout import Layout
from common.errors import ConfigError
from common.optim.optimizer import ParameterGroup
from common.step.train_step import SAMPLES, Losses, TrainStep


class MaskRCNNSegmentation(DetectionWorkload):
    """Instance segmentation with Mask R-CNN."""

    config_type: ClassVar[type] = MaskRCNNConfig
    title = "Mask R-CNN"
    peers = "benchmarks.maskrcnn.peer"
    backbone_file, backbone_origin = BACKBONE, "the rules'"
    input_deviation = 50.0  # like that of pixels
    first_class = 1
    own: MaskRCNNConfig
    model: MaskRCNN
    data: MaskData

    def __init__(self, cfg: RunConfig, layout: Layout) -> None:
        super().__init__(cfg, layout)
        own = self.own
        self._table = PolygonTable(own.reader.polygon_capacity, layout.device)
        self._pass = TrainingPass(self.model, own, self._table, self.dtype)
        self._preparer = Preparer(own.facts, own.model.implementations, layout.device, self.dtype)
        self.choices |= {**self._pass.choices, "resize": self._preparer.choice}

    def network(self, generator: torch.Generator) -> MaskRCNN:
        """Return the network."""
        return MaskRCNN(self.own.facts, generator)

    @staticmethod
    def load_backbone(network: MaskRCNN, path: Path) -> None:
        """Load the initial weights of the backbone from a file."""
        load_backbone(path, network.backbone.body)

    def picture_data(self) -> MaskData:
        """Return the description of the data."""
        return MaskData(self.own.facts, self.own.reader, self.dtype)

    def parameter_groups(self) -> list[ParameterGroup]:
        """Return weights, and biases with their own learning rate and without decay."""
        return parameter_groups(self.model, self.own.facts, self.own.hparams)

    @classmethod
    def declare(cls, cfg: RunConfig) -> Declaration:
        """Declare data format, initialised tensors, and what the closed division forbids beyond the logged values."""
        own: MaskRCNNConfig = cfg.workload
        hparams, broken = own.hparams, cls.forbidden_backbone(cfg)
        allowed = {1000, 1000 * cfg.micro_batch}
        if hparams.image_candidates not in allowed:
            broken.append(
                f"hparams.image_candidates={hparams.image_candidates}: the rules allow "
                f"{' or '.join(map(str, sorted(allowed)))}, 1000 or 1000 for each picture of a micro-batch"
            )
        names = _initialised_tensors(own.facts.mask_convolutions)
        # All readers use the same order.
        return Declaration(data_format=FORMAT, initialised_tensors=names, forbidden=broken)

    def build_step(self) -> TrainStep:
        """Build the step: accumulated micro-batches, then SGD."""
        schedule = learning_rate(self.own.facts, self.own.hparams)
        return self.step_with(self.own.hparams.sgd(), schedule, loss_scale=self.own.model.loss_scale)

    def loss(self, micro_batch: Batch) -> Losses:
        """Return the sum of the five losses of both stages, each a mean over the samples of the micro-batch.

        ``micro_batch`` has the inputs of :class:`benchmarks.maskrcnn.iteration.TrainingPass`; its key is the padded
        height and width.
        """
        losses = self._pass(micro_batch.tensors, _shape(micro_batch.key), self.loss_scale)
        return Losses(losses.total, {**losses.metrics, SAMPLES: micro_batch.tensors["real"].sum()})

    def example_batches(self) -> Iterable[Batch]:
        """Yield one random micro-batch with a few objects for each padded shape."""
        if not self.own.reader.shapes:
            raise ConfigError("reader.shapes=[]: at least one height and width that batches are padded to")
        generator = self.layout.generator("example")
        for shape in self.own.reader.shapes:
            tensors = self.to_device(self._example_objects(shape, generator))
            image_NCHW = self.example_images(self.cfg.micro_batch, shape, generator)
            yield Batch({"image": image_NCHW, **tensors}, self.nominal_samples, shape)

    def _example_objects(self, shape: Shape, generator: torch.Generator) -> dict[str, Tensor]:
        """Return the columns besides the pictures."""
        (height, width), pictures = shape, self.cfg.micro_batch
        boxes = self.example_boxes(torch.tensor([width - 1, height - 1]), generator)
        known = self.own.reader.polygon_capacity.objects
        first = max(known - self.own.reader.max_boxes, 1)
        return {
            **boxes,
            "count": boxes["count"].clamp(max=known),
            "size": torch.tensor([[height, width]], dtype=torch.float32).repeat(pictures, 1),
            "object": torch.randint(first, (pictures,), generator=generator),
            "transform": torch.tensor([[1.0, 1.0, 0.0, width]]).repeat(pictures, 1),
            "real": torch.ones(pictures, dtype=torch.bool),
            "seed": torch.tensor([1]),
        }

    def prepare(self, batch: HostBatch) -> Batch:
        """Copy pixels and objects to the device and compute the network's input there."""
        tensors = self.to_device(batch.tensors)
        return Batch(self._preparer(tensors, _shape(batch.key)), batch.samples, batch.key)

    def warm_up_reader(self) -> None:
        """Load DALI and run each of its operators once, if DALI is the reader. Warm up the preparer too."""
        super().warm_up_reader()
        self._preparer.warm_up(self.cfg.micro_batch, self.own.reader.shapes)

    def open_data(self, root: Path) -> DataSource:
        """Open the training pictures, and load the outlines of all their objects to the device."""
        self._table.load(open_prepared(root).table())
        return super().open_data(root)

    def evaluation(self, layout: Layout) -> DetectionEvaluation:
        """Return the evaluation, COCO's mean average precision of boxes and masks, on the ranks of ``layout``."""
        config = self.cfg.evaluation
        where = layout.device if config.scoring == "inline" else torch.device("cpu")
        scorer = MaskScorer(ground_truth, where, config.scorer_threads)
        made, choices = evaluation(
            self.model, self.own, self.data, self._preparer, layout, self.cfg.cuda_graphs, scorer
        )
        self.choices |= choices
        return made

    def synthetic_evaluation(self, layout: Layout) -> DetectionEvaluation:
        """Return an evaluation of random pictures."""
        return self.evaluation(layout).with_noise(self.cfg.benchmark.eval_samples)

    def sample_flops(self) -> float:
        """Return the FLOPs to train on one picture of the largest shape, with all slots of both heads in use."""
        facts = self.own.facts
        largest = max(self.own.reader.shapes, key=lambda shape: shape[0] * shape[1])
        return self.model.sample_flops(largest, facts.roi_sampled, facts.mask_slots)


def _shape(key: Hashable) -> Shape:
    """Return padded height and width from the key of a batch."""
    assert isinstance(key, tuple)
    height, width = key
    return height, width


def _initialised_tensors(mask_convolutions: int) -> list[str]:
    """Names of the layers outside the backbone, as the reference logs them since round v1.1."""
    names = [f"FPN_{kind}_block{level}" for kind in ("inner", "layer") for level in range(1, 5)]
    names += [f"RPNHead_{part}" for part in ("conv", "cls", "bbox")]
    names += [f"ROI_BOX_FEATURE_EXTRACTOR_fc{number}" for number in (6, 7)]
    names += [f"ROI_BOX_PREDICTOR_{part}" for part in ("cls", "bbox")]
    names += [f"ROI_MASK_FEATURE_EXTRACTOR_fcn{number}" for number in range(1, mask_convolutions + 1)]
    return [*names, "ROI_MASK_PREDICTOR_fcn5", "ROI_MASK_PREDICTOR_fcn_logits"]
