"""Time the same training with diffusers: ``python -m benchmarks.stable_diffusion.peer_bench``.

Its U-Net in the rules' sizes, channels_last, all in bf16 without masters and with fused AdamW, eagerly and compiled as
a whole, on latents and captions of noise that are already on the device. Ours beside it is the step of the recipe,
captured, once with its fastest implementations and once with references, whose blocks TorchInductor compiles one by
one.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.stable_diffusion.architecture import Architecture
from benchmarks.stable_diffusion.config import Facts
from benchmarks.stable_diffusion.workload import StableDiffusion
from common.config import loading
from common.config.composition import compose
from common.distributed.layout import Layout
from common.mlperf.fixed import fixed_facts
from common.ops.bench.stopwatch import median_ms, require_gpu
from common.ops.operation import OPTION
from common.step.graphs import StepRunner

ROWS = ("ours", "compiled", "diffusers", "diffusers-compiled")
COMPILED = ("group_norm", "layer_norm", "geglu", "bias_gradient")
"""Operations whose references TorchInductor fuses in the row ``compiled``."""
ZERO_STD = 0.02
"""Of the tensors that start from zero, of which a device multiplies faster than of trained ones."""


def build(architecture: Architecture) -> Any:
    """diffusers' network of ``architecture`` in fp32 on the CPU, with its own initial weights.

    Its norms all have the transformers' groups at first: those of the residual blocks and of the end get theirs here.
    """
    from diffusers import UNet2DConditionModel
    from diffusers.models.resnet import ResnetBlock2D

    levels = range(len(architecture.channel_multipliers))
    channels = [multiplier * architecture.model_channels for multiplier in architecture.channel_multipliers]
    attends = [level in architecture.attention_levels for level in levels]
    network = UNet2DConditionModel(
        sample_size=architecture.latent_size,
        in_channels=architecture.latent_channels,
        out_channels=architecture.latent_channels,
        block_out_channels=channels,
        layers_per_block=architecture.residual_blocks,
        attention_head_dim=[each // architecture.head_channels for each in channels],  # heads, by an old misnomer
        cross_attention_dim=architecture.context_width,
        use_linear_projection=True,
        norm_num_groups=architecture.transformer_norm_groups,
        norm_eps=architecture.norm_epsilon,
        down_block_types=["CrossAttnDownBlock2D" if attend else "DownBlock2D" for attend in attends],
        up_block_types=["CrossAttnUpBlock2D" if attend else "UpBlock2D" for attend in reversed(attends)],
    )
    for module in network.modules():
        if isinstance(module, ResnetBlock2D):
            module.norm1.num_groups = module.norm2.num_groups = architecture.norm_groups
    network.conv_norm_out.num_groups = architecture.norm_groups
    return network


def step_of(
    network: nn.Module, forward: Callable[..., Any], architecture: Architecture, batch: int, device: torch.device
) -> Callable[[], Tensor]:
    """An iteration over a batch of noise: forward, loss, backward, update; returns the loss."""
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-5, weight_decay=0.01, fused=device.type == "cuda")
    dtype, size = next(network.parameters()).dtype, architecture.latent_size
    generator = torch.Generator(device).manual_seed(1)
    shape = (batch, architecture.latent_channels, size, size)
    x_NCHW, target_NCHW = (
        torch.randn(shape, generator=generator, device=device).to(dtype, memory_format=torch.channels_last)
        for _ in range(2)
    )
    t_N = torch.randint(1000, (batch,), generator=generator, device=device)
    context = (batch, architecture.context_length, architecture.context_width)
    context_NTK = torch.randn(context, generator=generator, device=device).to(dtype)

    def step() -> Tensor:
        prediction = forward(x_NCHW, t_N, context_NTK, return_dict=False)[0]
        loss = nn.functional.mse_loss(prediction.float(), target_NCHW.float())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


@torch.no_grad()
def fill_zeros(network: nn.Module) -> None:
    """Put normal values into tensors that are zero, as in our own row."""
    for parameter in network.parameters():
        if not parameter.any():
            parameter.normal_(0.0, ZERO_STD)


def ours(given: list[str], device: torch.device, compiled: bool) -> Callable[[], Callable[[], object]]:
    """What builds the captured step of the recipe; with ``compiled`` its blocks are TorchInductor's."""

    def start() -> Callable[[], object]:
        choices = [f"{OPTION}.{name}=reference" for name in COMPILED] if compiled else []
        run, _ = loading.load(compose([*given, *choices]), lambda _: StableDiffusion)
        workload = StableDiffusion(run, Layout(device=device))
        if compiled:
            compile_blocks(workload)
        runner = StepRunner(workload.build_step(), workload.model, run.grad_accumulation_steps, run.cuda_graphs)
        (example,) = workload.example_batches()
        runner.warm_up([example])

        def step() -> None:
            with runner.on_stream():
                runner([example])

        return step

    return start


def compile_blocks(workload: StableDiffusion) -> None:
    """Let TorchInductor compile each block of the network alone, before its optimizer is built."""
    model = workload.model
    for blocks in (model.input_blocks, model.output_blocks):
        for number, block in enumerate(blocks):
            blocks[number] = _compiled(block)
    model.middle_block = _compiled(model.middle_block)


def _compiled(block: nn.Module) -> Any:
    return torch.compile(block, dynamic=False)


def peer(
    architecture: Architecture, batch: int, device: torch.device, compiled: bool
) -> Callable[[], Callable[[], object]]:
    """What builds diffusers' step."""

    def start() -> Callable[[], object]:
        network = build(architecture)
        fill_zeros(network)
        network = network.to(device, torch.bfloat16, memory_format=torch.channels_last)
        forward = torch.compile(network, dynamic=False) if compiled else network
        return step_of(network, forward, architecture, batch, device)

    return start


def main() -> None:
    """Print milliseconds of an iteration, pictures a second, and memory."""
    parser = argparse.ArgumentParser(description="time ours and diffusers' U-Net on a GPU")
    parser.add_argument("--batch", type=int, default=32, help="pictures of an iteration (default: 32)")
    parser.add_argument("--steps", type=int, default=100, help="timed (default: 100)")
    parser.add_argument("--warmup", type=int, default=20, help="before them (default: 20)")
    parser.add_argument("--precision", default="bf16", help="of ours: bf16 or fp16 (default: bf16)")
    parser.add_argument("--only", choices=ROWS, action="append", help="rows to measure (default: all)")
    args = parser.parse_args()
    require_gpu("benchmarks.stable_diffusion.peer_bench")
    facts, device = fixed_facts(Facts, "stable_diffusion"), torch.device("cuda")
    torch.backends.cudnn.benchmark = True
    torch._dynamo.config.cache_size_limit = 128  # of one code object: a shape for every block
    given = ["benchmark=stable_diffusion", "scale=1xH200", f"micro_batch={args.batch}", f"precision={args.precision}"]
    given += [f"hparams.global_batch_size={args.batch}", f"model.zero_std={ZERO_STD}"]
    starts = {
        "ours": ours(given, device, compiled=False),
        "compiled": ours(given, device, compiled=True),
        "diffusers": peer(facts, args.batch, device, compiled=False),
        "diffusers-compiled": peer(facts, args.batch, device, compiled=True),
    }
    print(f"PyTorch {torch.__version__}, {torch.cuda.get_device_name(device)}, {args.batch} pictures")
    for name in args.only or ROWS:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        step = starts[name]()
        for _ in range(args.warmup):
            step()
        milliseconds = median_ms(step, args.steps)
        memory = torch.cuda.max_memory_allocated() / 1e9
        print(
            f"{name:<20}{milliseconds:.1f} ms, {args.batch / milliseconds * 1e3:.1f} images/s, {memory:.1f} GB",
            flush=True,
        )
        del step  # and with it graphs, weights and moments
        gc.collect()


if __name__ == "__main__":
    main()
