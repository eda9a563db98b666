"""Variants of a workload's step: formats, CUDA graphs, implementations of operations, and numbers of GPUs.

The recipe itself has the empty variant name. Every other variant changes one thing:

- ``fp32``, ``tf32``, ``bf16`` or ``fp16``, ``fp8``: the format of matrix products, at the recipe's micro-batch;
- ``eager``: no CUDA graphs; its report also has the bytes and FLOPs of the kernels;
- ``reference``, ``compiled``: all operations are PyTorch's, as they are and compiled by ``torch.compile``;
- ``counters``: the eager step under ``ncu``, which counts bytes and busy tensor cores;
- ``host-links``: the largest number of GPUs exchanges its data through host memory (``NCCL_P2P_DISABLE``).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from common.measure.jobs import Job, jobs_of
from common.ops.operation import AUTO, REFERENCE

VARIANTS = ("precision", "graphs", "implementations", "gpus")
RECIPE = ""
EAGER, COMPILED, HOST_LINKS, COUNTERS = "eager", "compiled", "host-links", "counters"

SIXTEEN_BITS = ("bf16", "fp16")
FP8 = "fp8"
NARROW_PRODUCTS = ("fp8", "te")
"""Values of the settings for matrix products that mean FP8."""
NO_TF32 = {"NVIDIA_TF32_OVERRIDE": "0"}
TF32 = {"TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1"}
THROUGH_HOST = {"NCCL_P2P_DISABLE": "1", "NCCL_NVLS_ENABLE": "0"}

KEPT = frozenset({"linear", "accumulation", "convolution_moments"})
"""Operations that the variants ``reference`` and ``compiled`` leave alone: ``linear`` chooses a format, and the others
depend on another implementation than the reference."""

KERNELS = "bench.kernels=true"
SLOWEST_FORMAT = "fp32"
"""Format in which cuDNN's search for algorithms takes longest."""
ON_A_CPU = "this needs a GPU"


@dataclass(frozen=True)
class Plan:
    """Measurements of one workload.

    Attributes:
        jobs: the recipe first, and those that compile or search for long last.
        precision: format of the recipe's matrix products; empty if it is PyTorch's default for fp32 on a GPU.
        absent: name of a variant, or of several such as ``precision``, to the reason why no job measures it.
    """

    jobs: Sequence[Job]
    precision: str
    absent: Mapping[str, str]


def plan_of(
    benchmark: str,
    scales: Collection[str],
    scale: str,
    tree: Mapping[str, Any],
    variants: Collection[str],
    gpus: Sequence[int],
    places: int,
    cpu: bool,
    ncu: Sequence[str] = (),
) -> Plan:
    """Plan the measurements of a workload.

    Args:
        scales: names of all recipes of the workload; ``scale`` is one of them.
        tree: composed configuration of the recipe.
        variants: some of :data:`VARIANTS`.
        gpus: numbers of GPUs for the variant ``gpus``.
        places: number of GPUs of this machine.
        cpu: whether CPU ranks replace GPUs.
        ncu: words before the command line for the variant ``counters``; empty without ``ncu``.
    """
    counts = sorted({1, *(gpus if "gpus" in variants else ())})
    of_counts = sorted(jobs_of({benchmark: scales}, scale, counts, (), places), key=lambda job: job.gpus)
    base = replace(of_counts[0], settings=(KERNELS,))
    alone = replace(base, copies=1)
    several = of_counts[1:]
    absent: dict[str, str] = {name: "not requested (--variants)" for name in VARIANTS if name not in variants}
    quick, slow = [base, *several], list[Job]()
    captured = not cpu and tree["cuda_graphs"] is not False
    if captured:
        quick.append(replace(alone, variant=EAGER, settings=("cuda_graphs=false", KERNELS)))
    if "graphs" in variants and not captured:
        absent["graphs"] = ON_A_CPU if cpu else "the recipe uses no CUDA graphs"
    precision, formats = _formats(tree, cpu)
    if "precision" in variants:
        for name, (settings, environment) in formats.items():
            if name != precision:
                jobs = slow if name == SLOWEST_FORMAT else quick
                jobs.append(replace(alone, variant=name, settings=settings, environment=environment))
    if "gpus" in variants and not several:
        absent["gpus"] = "only one GPU is here, or was requested (--gpus)"
    elif "gpus" in variants and not cpu:
        quick.append(replace(several[-1], variant=HOST_LINKS, environment=THROUGH_HOST))
    if "implementations" in variants and cpu:
        absent["implementations"] = "on a CPU all operations are PyTorch's"
    elif "implementations" in variants:
        replaced = _references(tree)
        quick.append(replace(alone, variant=REFERENCE, settings=replaced))
        slow.append(replace(alone, variant=COMPILED, settings=(*replaced, "bench.compiled=true")))
    if ncu and not cpu:
        settings = ("cuda_graphs=false", "bench.only=counters")
        slow.append(replace(alone, variant=COUNTERS, settings=settings, prefix=ncu))
    else:
        absent[COUNTERS] = ON_A_CPU if cpu else "ncu is not installed"
    return Plan([*quick, *slow], precision, absent)


def _formats(tree: Mapping[str, Any], cpu: bool) -> tuple[str, dict[str, tuple[tuple[str, ...], Mapping[str, str]]]]:
    """Return the format of the recipe, and the settings and environment variables of each format."""
    model = tree.get("model") or {}
    own, products = model.get("linear"), (model.get("implementations") or {}).get("linear")
    wide: tuple[str, ...] = ()
    narrow: tuple[str, ...] = ()
    if own is not None:
        wide, narrow = ("model.linear=torch",), ("model.linear=fp8",)
    elif products is not None:
        wide, narrow = (f"model.implementations.linear={REFERENCE}",), ("model.implementations.linear=fp8",)
    recipe = tree["precision"]
    sixteen = recipe if recipe in SIXTEEN_BITS else SIXTEEN_BITS[0]
    single = ("precision=fp32", "optimizer.masters=fp32", *wide)
    formats: dict[str, tuple[tuple[str, ...], Mapping[str, str]]] = {
        sixteen: ((f"precision={sixteen}", *wide), {}),
        "fp32": (single, {} if cpu else NO_TF32),
    }
    if not cpu:
        formats["tf32"] = (single, TF32)
        if narrow:
            formats[FP8] = ((f"precision={sixteen}", *narrow), {})
    if (own or products or AUTO) in NARROW_PRODUCTS:
        return FP8, formats
    return (recipe if cpu or recipe in SIXTEEN_BITS else ""), formats


def _references(tree: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the settings that replace the operations of the suite by PyTorch's."""
    implementations = (tree.get("model") or {}).get("implementations") or {}
    return tuple(f"model.implementations.{name}={REFERENCE}" for name in implementations if name not in KEPT)
