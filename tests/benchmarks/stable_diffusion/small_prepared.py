"""Prepared data of a few random samples, written without the code of the preparation."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import io
import json
import pickle
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import safetensors.torch
import torch

from benchmarks.stable_diffusion.config import StableDiffusionConfig
from benchmarks.stable_diffusion.workload import StableDiffusion
from common.config import loading
from common.config.composition import compose
from common.config.schema import RunConfig

MOMENTS, CAPTIONS = (8, 4, 4), (77, 16)
"""Shapes of the ``test`` recipe."""
SAMPLES = (5, 3, 8)
"""Samples of three tars."""


@functools.cache
def recipe() -> RunConfig:
    """Return the configuration of the ``test`` recipe."""
    composed = compose(["benchmark=stable_diffusion", "scale=test", "device=cpu"])
    return loading.load(composed, lambda _: StableDiffusion)[0]


def configuration(**reader: object) -> StableDiffusionConfig:
    """Return the workload's configuration in the ``test`` recipe with another reader."""
    own: StableDiffusionConfig = recipe().workload
    return dataclasses.replace(own, reader=dataclasses.replace(own.reader, **reader))


def moments_of(tar: int, row: int) -> np.ndarray:
    """Return the moments of a sample, exact in bfloat16."""
    return (np.random.default_rng([tar, row]).integers(-128, 128, MOMENTS) / 8).astype(np.float32)


def captions_of(tar: int, row: int) -> np.ndarray:
    """Return the encoded caption of a sample, exact in bfloat16."""
    return (np.random.default_rng([tar, row, 1]).integers(-128, 128, CAPTIONS) / 64).astype(np.float32)


def caption_of(tar: int, row: int) -> str:
    """Return the caption of a sample."""
    return f"a Green square, {tar} {row}"


def npy_member(tar: int, row: int) -> bytes:
    file = io.BytesIO()
    np.save(file, moments_of(tar, row)[None])
    return file.getvalue()


def pyd_member(tar: int, row: int) -> bytes:
    return pickle.dumps({"image_embed": moments_of(tar, row)[None], "captions_embed": captions_of(tar, row)})


def safetensors_member(tar: int, row: int) -> bytes:
    arrays = {"captions": captions_of(tar, row), "moments": moments_of(tar, row)}
    return safetensors.torch.save({name: torch.from_numpy(each).bfloat16() for name, each in arrays.items()})


MEMBERS: dict[str, Callable[[int, int], bytes]] = {
    "npy": npy_member,
    "pyd": pyd_member,
    "safetensors": safetensors_member,
}


def write_tar(path: Path, members: dict[str, bytes]) -> None:
    """Write a tar like the reference: a folder without a name, then the sorted files."""
    with tarfile.open(path, "w") as tar:
        folder = tarfile.TarInfo("")
        folder.type = tarfile.DIRTYPE
        tar.addfile(folder)
        for name, content in sorted(members.items()):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))


def members_of(tar: int, samples: int, kind: str) -> dict[str, bytes]:
    """Return the contents of a tar by name."""
    made = {}
    for row in range(samples):
        key = f"{tar:05d}{row:04d}"
        made |= {f"{key}.{kind}": MEMBERS[kind](tar, row), f"{key}.txt": caption_of(tar, row).encode()}
        made[f"{key}.json"] = b"{}"
    return made


def write_prepared(root: Path, kind: str = "safetensors", samples: tuple[int, ...] = SAMPLES) -> Path:
    """Write a prepared folder, with indexes from a search in the bytes of the tars."""
    (root / "train").mkdir(parents=True)
    (root / "validation").mkdir()
    counts = {"train_samples": sum(samples), "eval_samples": 2, "tars": len(samples)}
    for number, of_it in enumerate(samples):
        name = f"train/{number:05d}.tar"
        members = members_of(number, of_it, kind)
        write_tar(root / name, members)
        content = (root / name).read_bytes()
        rows = []
        for row in range(of_it):
            parts = [members[f"{number:05d}{row:04d}.{suffix}"] for suffix in (kind, "txt")]
            rows.append([number for part in parts for number in (content.index(part), len(part))])
        np.save(root / f"train/{number:05d}.index.npy", np.array(rows, np.int64))
        counts[name] = of_it
    (root / "validation/val2014_30k.tsv").write_text("image_id\tid\tcaption\n9\t1\tone\n7\t4\ttwo\n")
    np.savez(root / "validation/val2014_30k_stats.npz", mu=np.zeros(3), sigma=np.eye(3))
    files = {}
    for path in sorted(root.rglob("*.*")):
        content = path.read_bytes()
        entry = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        files[str(path.relative_to(root))] = entry
    source = {"fingerprint": "synthetic", "members": kind}
    manifest = {
        "format": "stable-diffusion-moments/1",
        "files": files,
        "counts": counts,
        "synthetic": True,
        "custom": "",
        "source": source,
    }
    (root / "manifest.json").write_text(json.dumps(manifest))
    return root


def change_manifest(root: Path, **changed: object) -> None:
    """Change values of ``counts`` and ``source``; None removes one."""
    path = root / "manifest.json"
    content = json.loads(path.read_text())
    for name, value in changed.items():
        part = content["source"] if isinstance(value, str) else content["counts"]
        if value is None:
            del part[name]
        else:
            part[name] = value
    path.write_text(json.dumps(content))
