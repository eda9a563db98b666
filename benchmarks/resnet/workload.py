"""ResNet-50 as a workload: wires model, data, optimizer and evaluation."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.resnet.config import ResNetConfig
from benchmarks.resnet.data import DataSettings, EvalSource, choose_reader, open_eval, open_train, warm_up
from benchmarks.resnet.evaluate import TopOne
from benchmarks.resnet.model import Architecture, ResNet50, smoothed_cross_entropy
from common.config import RunConfig
from common.data.source import Batch, DataSource, HostBatch
from common.distributed.layout import Layout
from common.errors import ConfigError
from common.evaluation.base import Weights
from common.mlperf.admission import evaluation_schedule
from common.nn.batch_norm import BatchNorm2d, set_group
from common.optim.optimizer import Optimizer, ParameterGroup
from common.optim.rules import LARS, SGD
from common.optim.schedules import ScheduleSteps, nvidia_steps, polynomial, reference_steps
from common.precision import DTYPES
from common.step import TrainStep, accumulate
from common.workload import Losses, Workload


class ResNet(Workload):
    """Image classification with ResNet-50 v1.5."""

    config_type: ClassVar[type] = ResNetConfig

    def __init__(self, cfg: RunConfig, layout: Layout) -> None:
        super().__init__(cfg, layout)
        own: ResNetConfig = cfg.workload
        self.own = own
        for axis in ("pp", "cp", "tp"):
            if layout.size(axis) != 1:
                raise ConfigError(f"layout.{axis}={layout.size(axis)}: ResNet-50's ranks are data-parallel, use 1")
        self.dtype = DTYPES[cfg.precision]
        self._network, self._chosen = self._build_network()
        set_group(self._network, layout.subgroup("dp", own.hparams.bn_group))
        self._network.train()

    def _build_network(self) -> tuple[ResNet50, str]:
        """A network for training or for evaluation, and the name of the implementation chosen for it."""
        own = self.own
        architecture = Architecture(own.model.width, (3, 4, 6, 3), own.facts.classes, own.model.input_channels)
        network = ResNet50(architecture, self.layout.shared_generator("weights"), own.hparams.truncated_normal)
        for module in network.modules():
            if isinstance(module, BatchNorm2d):
                module.eps, module.momentum = own.facts.bn_epsilon, own.facts.bn_momentum
        network = network.cast(self.dtype).to(self.layout.device)
        return network, network.choose_implementation(own.model.batch_norm)

    @property
    def model(self) -> nn.Module:
        """The network."""
        return self._network

    def parameter_groups(self) -> list[ParameterGroup]:
        """Convolutions and classifier with decay and LARS's trust ratio; batch norm and bias plain.

        NVIDIA's variant of LARS decays the classifier's bias too and keeps the learning rate out of the momentum buffer
        of all half-precision tensors; batch norm keeps it inside. SGD is the reference's in either variant.
        """
        hparams = self.own.hparams
        lars, nvidia = hparams.optimizer == "lars", hparams.nvidia
        # The TF2 reference's SGD adds wd * sum(v^2) to the loss, whose gradient is 2 * wd * v, bias included.
        decay = hparams.weight_decay if lars else 2 * hparams.weight_decay
        weights, bias, norms = {}, {}, {}
        for name, parameter in self._network.named_parameters():
            if parameter.ndim > 1:
                weights[name] = parameter
            elif name == "fc.bias":
                bias[name] = parameter
            else:
                norms[name] = parameter
        inside = not nvidia
        return [
            ParameterGroup(weights, weight_decay=decay, trust_ratio=lars, learning_rate_in_momentum=inside),
            ParameterGroup(bias, weight_decay=decay if nvidia or not lars else 0.0, learning_rate_in_momentum=inside),
            ParameterGroup(norms, learning_rate_in_momentum=True),
        ]

    @classmethod
    def _schedule_steps(cls, cfg: RunConfig) -> ScheduleSteps:
        hparams = cfg.workload.hparams
        samples = cfg.benchmark.train_samples
        if hparams.nvidia:
            micro_batches = cfg.global_batch // cfg.micro_batch
            return nvidia_steps(samples, micro_batches, cfg.micro_batch, hparams.epochs, hparams.warmup_epochs)
        evaluations = evaluation_schedule(cfg)
        return reference_steps(
            samples,
            cfg.global_batch,
            hparams.epochs,
            hparams.warmup_epochs,
            evaluation_offset=evaluations.first % evaluations.interval,
            evaluation_period=evaluations.interval,
        )

    @classmethod
    def derived_values(cls, cfg: RunConfig) -> dict[str, object]:
        """Decay steps and the samples that share batch-norm statistics."""
        steps = cls._schedule_steps(cfg)
        # The reference counts its steps from 0, and so has one more between warm-up and end.
        counted_from_0 = int(not cfg.workload.hparams.nvidia)
        return {
            "decay_steps": steps.total_steps - steps.warmup_steps + counted_from_0,
            "model_bn_span": cfg.micro_batch * cfg.workload.hparams.bn_group,
        }

    @classmethod
    def closed_division(cls, cfg: RunConfig) -> list[str]:
        """The width of the network, and the constants of the optimizer and the loss that no key of the log shows."""
        own: ResNetConfig = cfg.workload
        hparams, broken = own.hparams, []
        if own.model.width != 64:
            broken.append(f"model.width={own.model.width}: the benchmark's model is ResNet-50 of width 64")
        if hparams.label_smoothing not in (0.0, 0.1):
            broken.append(f"hparams.label_smoothing={hparams.label_smoothing}: the rules' table allows 0 and 0.1")
        if hparams.optimizer == "lars" and hparams.lars_eta != 0.001:
            broken.append(f"hparams.lars_eta={hparams.lars_eta}: the reference's LARS has 0.001, and no rule frees it")
        return broken

    @classmethod
    def order_of_data(cls, cfg: RunConfig) -> str:
        """The reader: each has an order of its own, and DALI's depends on the number of replicas."""
        reader = choose_reader(cfg.workload.reader.reader)
        return f"dali, {cfg.layout['dp']} shards" if reader == "dali" else reader

    def build_step(self) -> TrainStep:
        """Accumulated micro-batches, then LARS or SGD.

        After ``hparams.epochs`` the learning rate stays at its end in both variants; in NVIDIA's submissions, which
        do not clamp the polynomial, it would rise again.
        """
        hparams, cfg = self.own.hparams, self.cfg
        steps = self._schedule_steps(cfg)
        schedule = polynomial(
            hparams.base_learning_rate,
            hparams.end_learning_rate,
            hparams.decay_power,
            steps.warmup_steps,
            steps.total_steps,
            first_step=1 if hparams.nvidia else 0,
        )
        rule = (
            LARS(hparams.momentum, hparams.lars_eta, hparams.lars_epsilon)
            if hparams.optimizer == "lars"
            else SGD(hparams.momentum)
        )
        optimizer = Optimizer(
            self.parameter_groups(),
            rule,
            schedule,
            self.layout,
            grad_divisor=cfg.global_batch,
            ranks_per_node=cfg.scale.gpus_per_node,
            **cfg.optimizer.arguments(),
        )
        return TrainStep(accumulate(self.loss), [optimizer], self.layout)

    def loss(self, micro_batch: Batch) -> Losses:
        """Smoothed cross-entropy, summed over the micro-batch: fp16 gradients then need no loss scale.

        ``micro_batch`` holds ``image`` (N, C, H, W) and ``label`` (N,). The optimizer divides by the global batch.
        """
        logits_NK = self._network(micro_batch.tensors["image"])
        label_N = micro_batch.tensors["label"]
        total = smoothed_cross_entropy(logits_NK, label_N, self.own.hparams.label_smoothing)
        return Losses(total, {"loss": total.detach() / len(label_N)})

    def example_batches(self) -> Iterable[Batch]:
        """One micro-batch of noise; all of training has the same shape."""
        generator = self.layout.generator("example")
        image_NCHW = self._example_images(self.cfg.micro_batch, generator)
        label_N = torch.randint(self.own.facts.classes, (self.cfg.micro_batch,), generator=generator)
        yield Batch({"image": image_NCHW, "label": label_N.to(self.layout.device)}, self._nominal_samples)

    def _example_images(self, count: int, generator: torch.Generator) -> Tensor:
        size, channels = self.own.facts.image_size, self.own.model.input_channels
        image_NCHW = torch.randn(count, channels, size, size, generator=generator, dtype=torch.float32)
        image_NCHW[:, 3:] = 0
        return image_NCHW.to(self.layout.device, self.dtype, memory_format=torch.channels_last)

    @property
    def _nominal_samples(self) -> int:
        return self.cfg.micro_batch * self.layout.size("dp")

    def _data_settings(self) -> DataSettings:
        return DataSettings(self.own.facts, self.own.reader, self.own.model.input_channels, self.dtype)

    def warm_up_reader(self) -> None:
        """Load DALI, where it reads, and run each of its operators once."""
        warm_up(self._data_settings(), self.layout, self.cfg.micro_batch)

    def open_data(self, root: Path) -> DataSource:
        """Open the training pictures."""
        return open_train(
            root, self._data_settings(), self.layout, self.cfg.micro_batch, self.cfg.grad_accumulation_steps
        )

    def prepare(self, batch: HostBatch) -> Batch:
        """Copy a host batch to the device; a batch of DALI's is there already."""
        device = self.layout.device
        tensors = {name: tensor.to(device, non_blocking=True) for name, tensor in batch.tensors.items()}
        return Batch(tensors, batch.samples, batch.key)

    @torch.no_grad()
    def weights(self) -> Weights:
        """Parameters, and batch-norm statistics averaged over the replicas in one all-reduce of 53,120 floats."""
        tensors = dict(self._network.state_dict())
        group = self.layout.group("dp")
        if group is not None:
            names = [name for name, _ in self._network.named_buffers()]
            flat = torch.cat([tensors[name].flatten() for name in names])
            dist.all_reduce(flat, group=group)
            flat /= self.layout.size("dp")
            for name, average in zip(names, flat.split([tensors[name].numel() for name in names]), strict=True):
                tensors[name] = average
        return Weights(tensors)

    def evaluation(self, layout: Layout) -> TopOne:
        """Top-1 accuracy on the ranks of ``layout``."""
        settings, batch = self._data_settings(), self.own.reader.eval_batch

        def open_source(root: Path) -> EvalSource:
            return open_eval(root, settings, layout, batch)

        example = self._example_images(batch, self.layout.generator("example"))
        kept = self.own.reader.eval_cache_mb << 20
        network, _ = self._build_network()
        return TopOne(network, open_source, example, layout, capture=self.cfg.cuda_graphs, cache_bytes=kept)

    def sample_flops(self) -> float:
        """FLOPs of one training picture."""
        return self._network.sample_flops(self.own.facts.image_size)

    def implementations(self) -> dict[str, str]:
        """The batch norm chosen."""
        return {"batch_norm": self._chosen}
