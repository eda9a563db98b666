"""Measure the operations of a transformer in every implementation on one GPU: an encoder's at the sizes of BERT-large,
a decoder's (rms_norm, rope, swiglu, lora_input, transpose, causal_attention) for a sequence of Llama-2-70B, and
(layer_norm_1p, bias_gelu written, qkv_gradient, causal_attention interleaved) for two of GPT-3, whole and a quarter,
those of one-stage detection (conv_bias_relu, matching, suppression) for 32 pictures of RetinaNet, those of
recommendation (linear_relu, logit) for 6,912 samples of DLRM-DCNv2, and those of diffusion (dense_attention,
upsample_convolution, group_norm, geglu, add_layer_norm, bias_gradient) for 32 and 2 pictures of Stable Diffusion.

``python -m common.ops.bench`` prints for forward and backward of an operation milliseconds of one call, how many of
them a step has, the bytes that must be moved and their rate as a share of the copy bandwidth, and TFLOP/s of the
model's FLOP where arithmetic counts. Backward is the difference between both together and forward. ``--batches`` are
packs of 512 tokens; ``--cases`` limits all to names that contain one of the given words, and ``--sweep`` times the
tiles of our kernels instead.

Every pass is captured in a CUDA graph of several calls, whose tensors are larger than the L2 cache. Cases run in a
process of their own, and another one continues behind a case that failed, hung or crashed: it costs one line.
"""

from __future__ import annotations

from common.ops.add_layer_norm import bench_cases as add_layer_norm
from common.ops.anchor_matching import bench_cases as anchor_matching
from common.ops.attention import bench_cases as attention
from common.ops.bench import command, transformer
from common.ops.bench.cases import Entry
from common.ops.bench.sweep import Sweep
from common.ops.bias_gelu import bench_cases as bias_gelu
from common.ops.bias_gradient import bench_cases as bias_gradient
from common.ops.causal_attention import bench_cases as causal_attention
from common.ops.conv_bias_relu import bench_cases as conv_bias_relu
from common.ops.cross_entropy import bench_cases as cross_entropy
from common.ops.dense_attention import bench_cases as dense_attention
from common.ops.dropout import bench_cases as dropout
from common.ops.dropout_add_norm import bench_cases as dropout_add_norm
from common.ops.fp8_cast import bench_cases as fp8_cast
from common.ops.geglu import bench_cases as geglu
from common.ops.group_norm import bench_cases as group_norm
from common.ops.layer_norm_1p import bench_cases as layer_norm_1p
from common.ops.linear import bench_cases as linear
from common.ops.linear_relu import bench_cases as linear_relu
from common.ops.logit import bench_cases as logit
from common.ops.lora_input import bench_cases as lora_input
from common.ops.qkv_gradient import bench_cases as qkv_gradient
from common.ops.rms_norm import bench_cases as rms_norm
from common.ops.rope import bench_cases as rope
from common.ops.suppression import bench_cases as suppression
from common.ops.swiglu import bench_cases as swiglu
from common.ops.transpose_fp8 import bench_cases as transpose_fp8
from common.ops.upsample_convolution import bench_cases as upsample_convolution

ENCODER = (dropout, dropout_add_norm, bias_gelu, cross_entropy, attention, linear, fp8_cast)
DECODER = (rms_norm, rope, swiglu, lora_input, transpose_fp8, causal_attention, layer_norm_1p, qkv_gradient)
DETECTION = (conv_bias_relu, anchor_matching, suppression)
RECOMMENDATION = (linear_relu, logit)
DIFFUSION = (dense_attention, upsample_convolution, group_norm, geglu, add_layer_norm, bias_gradient)
EVERY = (*ENCODER, *DECODER, *DETECTION, *RECOMMENDATION, *DIFFUSION)


def entries() -> list[Entry]:
    """Everything that can be measured."""
    return [entry for cases in EVERY for entry in cases.entries()]


def sweeps() -> dict[str, Sweep]:
    """Tiles of all kernels."""
    return {name: sweep for cases in EVERY for name, sweep in cases.sweeps().items()}


if __name__ == "__main__":
    command.main(command.Suite("common.ops.bench", __doc__, entries, sweeps, batches=str(transformer.PACKS)))
