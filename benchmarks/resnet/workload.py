"""ResNet-50 as a workload: connects model, data, optimizer and evaluation."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from benchmarks.resnet.config import ResNetConfig
from benchmarks.resnet.data import ImageNet
from benchmarks.resnet.evaluate import TopOne
from benchmarks.resnet.model import ResNet50, smoothed_cross_entropy
from benchmarks.resnet.prepare import FORMAT
from common.config.schema import Declaration, RunConfig
from common.contract.evaluation import Weights
from common.contract.workload import Workload
from common.data.batches import Batch, DataSource, EvalSource
from common.distributed.layout import Layout
from common.mlperf.admission import evaluation_schedule
from common.nn.batch_norm import averaged_statistics, set_group
from common.nn.resnet import PADDED_CHANNELS
from common.optim.learning_rate import ScheduleSteps, nvidia_steps, polynomial, reference_steps
from common.optim.optimizer import ParameterGroup
from common.step.train_step import Losses, TrainStep
from common.vision.dali import choose_reader
from common.vision.reader import CachedSource


class ResNet(Workload):
    """Image classification with ResNet-50 v1.5."""

    config_type: ClassVar[type] = ResNetConfig
    title = "ResNet-50"
    own: ResNetConfig
    model: ResNet50

    def __init__(self, cfg: RunConfig, layout: Layout) -> None:
        super().__init__(cfg, layout)
        self.model = self._build_network()
        set_group(self.model, layout.subgroup("dp", self.own.hparams.bn_group))
        self._data = ImageNet(self.own.facts, self.own.reader, self.dtype)

    def _build_network(self) -> ResNet50:
        """Build a network for training or for evaluation."""
        own = self.own
        architecture = own.facts.architecture(own.model.width)
        network = ResNet50(architecture, self.layout.shared_generator("weights"), own.hparams.truncated_normal)
        network = network.cast(self.dtype).to(self.layout.device)
        self.choices |= network.choose_implementations(own.model.implementations)
        return network

    def parameter_groups(self) -> list[ParameterGroup]:
        """Return three groups: weights (decay; LARS's trust ratio), the classifier's bias, and batch norms (no decay).

        NVIDIA's LARS also decays the bias, and keeps the learning rate out of the momentum buffer of the 54 weights.
        For batch norm and the bias the rate stays inside. The bias is an exception in NVIDIA's optimizer: it updates
        54 of the 55 half-precision tensors together and the last one alone, after the rate ratio that would correct
        its momentum has become 1. SGD follows the reference in both variants: it decays weights and bias.
        """
        hparams = self.own.hparams
        lars, nvidia = hparams.optimizer == "lars", hparams.nvidia
        # The TF2 reference's SGD adds wd * sum(v^2) to the loss, whose gradient is 2 * wd * v, bias included.
        decay = hparams.weight_decay if lars else 2 * hparams.weight_decay
        weights, bias, norms = {}, {}, {}
        for name, parameter in self.model.named_parameters():
            if parameter.ndim > 1:
                weights[name] = parameter
            elif name == "fc.bias":
                bias[name] = parameter
            else:
                norms[name] = parameter
        return [
            ParameterGroup(weights, weight_decay=decay, trust_ratio=lars, learning_rate_in_momentum=not nvidia),
            ParameterGroup(bias, weight_decay=decay if nvidia or not lars else 0.0, learning_rate_in_momentum=True),
            ParameterGroup(norms, learning_rate_in_momentum=True),
        ]

    @staticmethod
    def _schedule_steps(cfg: RunConfig) -> ScheduleSteps:
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
    def declare(cls, cfg: RunConfig) -> Declaration:
        """Declare logged values (decay steps, batch-norm span) and what the closed division forbids.

        The log has no key for some constants of the rules: the network's width, label smoothing and LARS's eta. Each
        reader has its own order of data; DALI's order depends on the number of replicas.
        """
        own: ResNetConfig = cfg.workload
        hparams, steps, broken = own.hparams, cls._schedule_steps(cfg), []
        if own.model.width != 64:
            broken.append(f"model.width={own.model.width}: the benchmark's model is ResNet-50 of width 64")

        def order_of_data() -> str:
            reader = choose_reader(own.reader.reader)
            return f"dali, {cfg.layout['dp']} shards" if reader == "dali" else reader

        # The reference counts steps from 0, and so has one more step between warm-up and end.
        decay_steps = steps.total_steps - steps.warmup_steps + int(not hparams.nvidia)
        derived = {"decay_steps": decay_steps, "model_bn_span": cfg.micro_batch * hparams.bn_group}
        return Declaration(
            data_format=FORMAT,
            initialised_tensors=_initialised_tensors(),
            derived_values=derived,
            forbidden=broken,
            order_of_data=order_of_data,
        )

    def build_step(self) -> TrainStep:
        """Build the step: accumulated micro-batches, then LARS or SGD.

        After ``hparams.epochs`` the learning rate stays at its end value in both variants. NVIDIA's submissions do not
        clamp the polynomial, so that their rate would rise again.
        """
        hparams = self.own.hparams
        steps = self._schedule_steps(self.cfg)
        schedule = polynomial(
            hparams.base_learning_rate,
            hparams.end_learning_rate,
            hparams.decay_power,
            steps.warmup_steps,
            steps.total_steps,
            first_step=1 if hparams.nvidia else 0,
        )
        rule = hparams.lars() if hparams.optimizer == "lars" else hparams.sgd()
        return self.step_with(rule, schedule, grad_divisor=self.cfg.global_batch)

    def loss(self, micro_batch: Batch) -> Losses:
        """Return the smoothed cross-entropy, summed over the micro-batch.

        ``micro_batch`` has ``image`` (N, C, H, W) and ``label`` (N,). The optimizer divides by the global batch. With
        a sum, fp16 gradients need no loss scale.
        """
        logits_NK = self.model(micro_batch.tensors["image"])
        label_N = micro_batch.tensors["label"]
        total = smoothed_cross_entropy(logits_NK, label_N, self.own.hparams.label_smoothing)
        return Losses(total, {"loss": total.detach() / len(label_N)})

    def example_batches(self) -> Iterable[Batch]:
        """Yield one random micro-batch, which has the shape of every training micro-batch."""
        generator = self.layout.generator("example")
        image_NCHW = self._example_images(self.cfg.micro_batch, generator)
        label_N = torch.randint(self.own.facts.classes, (self.cfg.micro_batch,), generator=generator)
        yield Batch({"image": image_NCHW, "label": label_N.to(self.layout.device)}, self.nominal_samples)

    def _example_images(self, count: int, generator: torch.Generator) -> Tensor:
        size = self.own.facts.image_size
        image_NCHW = torch.randn(count, PADDED_CHANNELS, size, size, generator=generator, dtype=torch.float32)
        image_NCHW[:, 3:] = 0
        return image_NCHW.to(self.layout.device, self.dtype, memory_format=torch.channels_last)

    def warm_up_reader(self) -> None:
        """Load DALI and run each of its operators once, if DALI is the reader."""
        self._data.warm_up(self.layout, self.cfg.micro_batch)

    def open_data(self, root: Path) -> DataSource:
        """Open the training pictures."""
        return self._data.open_train(root, self.layout, self.cfg.micro_batch, self.cfg.grad_accumulation_steps)

    def weights(self) -> Weights:
        """Return parameters, and batch-norm statistics averaged over the replicas (one all-reduce of 53,120 floats)."""
        return Weights({**self.model.state_dict(), **averaged_statistics(self.model, self.layout)})

    def evaluation(self, layout: Layout) -> TopOne:
        """Return the top-1 evaluation on the ranks of ``layout``."""
        reader = self.own.reader
        example = self._example_images(reader.eval_batch, self.layout.generator("example"))

        def open_source(root: Path) -> EvalSource:
            source = self._data.open_eval(root, layout, reader.eval_batch)
            fits = len(source) * example.numel() * example.element_size() <= reader.eval_cache_mb << 20
            return CachedSource(source, layout.device) if fits else source

        return TopOne(self._build_network(), open_source, example, layout, self.cfg.cuda_graphs)

    def sample_flops(self) -> float:
        """Return the FLOPs to train on one picture."""
        return self.model.sample_flops(self.own.facts.image_size)


def _initialised_tensors() -> list[str]:
    """Names of all weights and of both parameters of every batch norm, as in NVIDIA's MXNet network."""
    names, norms = ["conv0_weight", "fc1_weight", "fc1_bias"], ["bn0"]
    for stage, blocks in enumerate((3, 4, 6, 3), 1):
        for unit in range(1, blocks + 1):
            block = f"stage{stage}_unit{unit}"
            names += [f"{block}_conv{number}_weight" for number in (1, 2, 3)]
            norms += [f"{block}_bn{number}" for number in (1, 2, 3)]
        names.append(f"stage{stage}_unit1_conv1sc_weight")
        norms.append(f"stage{stage}_unit1_bnsc")
    return names + [f"{norm}_{part}" for norm in norms for part in ("gamma", "beta")]
