"""Base of all detection networks as workloads: backbone file, reader, synthetic batches and evaluation.

A workload adds its network, targets, loss, data and learning rate.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from common.config.schema import RunConfig
from common.contract.workload import Workload
from common.data.batches import Batch, DataSource, EvalSource
from common.detection.annotations import Annotations
from common.detection.coco_scorer import CocoScorer
from common.detection.detections import Found
from common.detection.evaluation import DetectionEvaluation, of_pictures
from common.distributed.layout import Layout
from common.nn.backbone_file import load_backbone
from common.nn.frozen import frozen_digest
from common.vision.reader import PictureData

EXAMPLE_BOXES = 7
"""Boxes per synthetic picture, which is the average of COCO and of OpenImages."""


class Detector(Protocol):
    """Finds objects in an evaluation batch. ``choice`` is the chosen implementation of ``suppression``."""

    choice: str

    def __call__(self, batch: Mapping[str, Tensor]) -> Found:
        """Return the detections of a batch."""
        ...


class DetectionWorkload(Workload):
    """Detection of objects in pictures.

    Its configuration has ``facts`` with ``classes``, ``image_size`` and ``detections``, ``model`` with ``backbone`` and
    ``implementations``, and ``reader`` (:class:`common.detection.config.BoxReaderConfig`).
    """

    backbone_file: ClassVar[str]
    """Name of the file with the backbone's initial weights that the rules require."""
    backbone_origin: ClassVar[str] = "torchvision's"
    channels: ClassVar[int] = 3
    """Channels of the network's input; those after the third are zero."""
    input_deviation: ClassVar[float] = 1.0
    """Standard deviation of the values of synthetic pictures."""
    first_class: ClassVar[int] = 0
    """Number of the first class."""

    def __init__(self, cfg: RunConfig, layout: Layout) -> None:
        super().__init__(cfg, layout)
        own = self.own
        network: Any = self.network(layout.shared_generator("weights"))
        if cfg.assets_dir is not None:
            self.load_backbone(network, cfg.assets_dir / own.model.backbone)
        self.model = network.cast(self.dtype).to(layout.device)
        self.choices |= network.choose_implementations(own.model.implementations)
        self.data = self.picture_data()
        self._base_digest = frozen_digest(self.model) if self.frozen() else None

    @abstractmethod
    def network(self, generator: torch.Generator) -> nn.Module:
        """Return the network with initial weights from ``generator``."""

    @abstractmethod
    def picture_data(self) -> PictureData[Any, Any]:
        """Return the description of the data."""

    @staticmethod
    def load_backbone(network: Any, path: Path) -> None:
        """Load the initial weights of the backbone from a file."""
        load_backbone(path, network.backbone.body)

    def base_digest(self) -> str | None:
        """Return the digest of the frozen tensors, which checkpoints store instead of them; None without any."""
        return self._base_digest

    @classmethod
    def forbidden_backbone(cls, cfg: RunConfig) -> list[str]:
        """Return what the closed division forbids about the initial weights, and the log does not show."""
        wanted, used = f"training starts from {cls.backbone_origin} {cls.backbone_file}", cfg.workload.model.backbone
        broken = [] if used == cls.backbone_file else [f"model.backbone={used}: {wanted}"]
        return broken + ([f"assets_dir=null: {wanted}, in assets_dir"] if cfg.assets_dir is None else [])

    def warm_up_reader(self) -> None:
        """Load DALI and run each of its operators once, if DALI is the reader."""
        self.data.warm_up(self.layout, self.cfg.micro_batch)

    def open_data(self, root: Path) -> DataSource:
        """Open the training pictures."""
        return self.data.open_train(root, self.layout, self.cfg.micro_batch, self.cfg.grad_accumulation_steps)

    def example_images(self, count: int, shape: Sequence[int], generator: torch.Generator) -> Tensor:
        """Return ``count`` pictures of noise of height and width ``shape`` on the device, in channels_last memory."""
        image_NCHW = self.input_deviation * torch.randn((count, self.channels, *shape), generator=generator)
        image_NCHW[:, 3:] = 0
        return image_NCHW.to(self.layout.device, self.dtype, memory_format=torch.channels_last)

    def example_boxes(self, scale: Tensor | float, generator: torch.Generator) -> dict[str, Tensor]:
        """Return ``boxes``, ``label`` and ``count`` of a micro-batch, on the host.

        Kernels are compiled for their shapes, which are those of the reader's batches.

        Args:
            scale: largest coordinate, or (2,) largest x and y.
        """
        count, capacity, first = self.cfg.micro_batch, self.own.reader.max_boxes, self.first_class
        corners_BM22 = torch.rand((count, capacity, 2, 2), generator=generator).sort(2).values * scale
        return {
            "boxes": corners_BM22.flatten(2),
            "label": torch.randint(first, first + self.own.facts.classes, (count, capacity), generator=generator),
            "count": torch.full((count,), min(EXAMPLE_BOXES, capacity)),
        }


class SquareDetection(DetectionWorkload):
    """Detection in pictures that are resized to squares of ``facts.image_size`` px; all batches have one shape."""

    @abstractmethod
    def targets(self, boxes: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the network's targets, given ``boxes``, ``label`` and ``count`` on the device."""

    @abstractmethod
    def box_scale(self) -> float:
        """Return the largest coordinate of the reader's boxes."""

    @abstractmethod
    def detector(self, layout: Layout) -> Detector:
        """Return the detector of an evaluation."""

    @abstractmethod
    def ground_truth(self) -> Callable[[Path], Annotations]:
        """Return the module-level function that reads the boxes with which detections are compared."""

    def name_classes(self, detector: Any, root: Path) -> None:
        """Give the detector the class ids of the data under ``root``. Default: detections have those of the model."""

    def example_batches(self) -> Iterable[Batch]:
        """Yield one random micro-batch with a few boxes, which has the shapes of every training micro-batch."""
        generator, side = self.layout.generator("example"), self.own.facts.image_size
        boxes = self.to_device(self.example_boxes(self.box_scale(), generator))
        image_NCHW = self.example_images(self.cfg.micro_batch, (side, side), generator)
        yield Batch({"image": image_NCHW, **self.targets(boxes)}, self.nominal_samples)

    def finished(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return pictures, and the targets of their boxes."""
        return {"image": tensors["image"], **self.targets(tensors)}

    def evaluation(self, layout: Layout) -> DetectionEvaluation:
        """Return the evaluation, COCO's mean average precision, on the ranks of ``layout``."""
        facts, batch = self.own.facts, self.own.reader.eval_batch
        detector = self.detector(layout)
        self.choices["suppression"] = detector.choice

        def open_source(root: Path) -> EvalSource:
            self.name_classes(detector, root)
            return self.data.open_eval(root, layout, batch)

        example = self.example_images(batch, (facts.image_size, facts.image_size), layout.generator("example"))
        on_device = self.cfg.evaluation.scoring == "inline"
        return DetectionEvaluation(
            self.model,
            {(): of_pictures(detector, example)},
            open_source,
            facts.detections,
            layout,
            self.cfg.cuda_graphs,
            CocoScorer(self.ground_truth(), layout.device if on_device else torch.device("cpu")),
        )

    def synthetic_evaluation(self, layout: Layout) -> DetectionEvaluation:
        """Return an evaluation of random pictures."""
        return self.evaluation(layout).with_noise(self.cfg.benchmark.eval_samples)

    def sample_flops(self) -> float:
        """Return the FLOPs to train on one picture."""
        model: Any = self.model
        flops: float = model.sample_flops(self.own.facts.image_size)
        return flops
