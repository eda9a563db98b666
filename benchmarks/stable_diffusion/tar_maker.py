"""Conversion of a raw tar to a prepared tar: pictures to moments, captions to encoded captions.

The bytes of a tar depend only on the raw tar and the networks, not on other tars or on interruptions: samples are
sorted by key, and encoded in fixed groups.
"""

from __future__ import annotations

import functools
import hashlib
import os
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from benchmarks.stable_diffusion import formats
from benchmarks.stable_diffusion.encoders import CaptionEncoder, MomentsEncoder, read_picture
from benchmarks.stable_diffusion.formats import MEMBERS, SampleShape
from benchmarks.stable_diffusion.frozen.sizes import TextSizes, VaeSizes
from benchmarks.stable_diffusion.raw import FORMS, PICTURE
from common.data import atomic, preparation
from common.data.gpu_processes import device_of_process
from common.data.preparation import link_or_copy
from common.data.threads import read_groups
from common.errors import DataError
from common.formats.raw_files import add_member
from common.formats.tar_index import decode_text, index_tar

Range = Sequence[int]
"""Offset and size of a member in its tar, in bytes."""
TOGETHER = 16
"""Samples that a network encodes together. With pictures of 512 px, one activation has 2 GB, and several are alive."""


@dataclass(frozen=True)
class ConversionSettings:
    """Settings of the conversion, the same in all processes.

    Attributes:
        form: form of the raw tars, one of :data:`benchmarks.stable_diffusion.raw.FORMS`.
        member: suffix of the prepared members, one of :data:`benchmarks.stable_diffusion.formats.MEMBERS`.
        image_size: height and width of the VAE's input, px.
        checkpoint: file with the weights of both networks.
        digest: expected digest of ``checkpoint``; None accepts any.
        vocabulary: file with the tokenizer's merges.
        device: ``cpu``, or ``cuda`` for one GPU per process.
        threads: threads per process that read and decode.
    """

    form: str
    member: str
    image_size: int
    vae: VaeSizes
    text: TextSizes
    checkpoint: Path
    digest: str | None
    vocabulary: Path
    device: str
    threads: int

    @property
    def unchanged(self) -> bool:
        """Return whether the raw tars are used unchanged."""
        return FORMS[self.form] == self.member

    @property
    def encodes_pictures(self) -> bool:
        """Return whether the VAE is needed."""
        return FORMS[self.form] == PICTURE

    @property
    def encodes_captions(self) -> bool:
        """Return whether the text tower is needed."""
        return MEMBERS[self.member].encoded and FORMS[self.form] in (PICTURE, formats.MOMENTS)

    @property
    def shape(self) -> SampleShape:
        """Return the shapes of a sample."""
        side = self.image_size // self.vae.factor
        return SampleShape((2 * self.vae.latent_channels, side, side), (self.text.context, self.text.width))

    @property
    def sample_bytes(self) -> int:
        """Return the minimum size of a prepared sample in bytes."""
        moments = torch.Size(self.shape.moments).numel()
        member = MEMBERS[self.member]
        return member.dtype.itemsize * (moments + member.encoded * torch.Size(self.shape.captions).numel())


@dataclass(frozen=True)
class Loaded:
    """A sample of a raw tar: a picture or its moments, the caption, and possibly the encoded caption."""

    key: str
    picture_3SS: Tensor | None
    moments_CHW: Tensor | None
    captions_TK: Tensor | None
    caption: str


@dataclass(frozen=True)
class _Networks:
    moments: MomentsEncoder | None
    captions: CaptionEncoder | None


class _Hashed:
    """A file that is written sequentially and hashed at the same time."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.sha256, self.bytes = file, hashlib.sha256(), 0

    def write(self, content: bytes) -> int:
        self.sha256.update(content)
        self.bytes += len(content)
        return self._file.write(content)


def make_tar(source: Path, target: Path, plan: ConversionSettings) -> dict[str, Any]:
    """Make ``target`` from ``source``; when this returns, the file is complete and on disk.

    Returns:
        Number of ``samples``, ``bytes`` and ``sha256`` (hexadecimal) of the tar.

    Raises:
        DataError: the raw tar, a picture or a caption is damaged or missing, moments have a wrong shape or dtype, or
            the disk is too small.
        CheckpointError: the checkpoint is missing or damaged, or has another digest or other tensors.
    """
    keys, ranges_S22 = index_tar(source, (FORMS[plan.form], formats.CAPTION))
    members = dict(sorted(zip(keys, ranges_S22.tolist(), strict=True), key=lambda item: f"{item[0]}."))
    if plan.unchanged:
        for _ in _loaded(source, members, plan):
            pass
        link_or_copy(source, target, "delete it and prepare again")
        with open(target, "rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        return {"samples": len(members), "bytes": target.stat().st_size, "sha256": sha256}
    target.parent.mkdir(parents=True, exist_ok=True)
    preparation.require_space(target.parent, len(members) * plan.sample_bytes)
    with atomic.written(target) as beside, open(beside, "wb") as file:
        hashed = _Hashed(file)
        with tarfile.open(fileobj=hashed, mode="w|") as tar:  # type: ignore[call-overload]  # has all that is used
            for key, content, caption in _encoded(_loaded(source, members, plan), plan):
                add_member(tar, f"{key}.{plan.member}", content)  # names are sorted: txt is the last suffix
                add_member(tar, f"{key}.{formats.CAPTION}", formats.encode_caption(caption))
    return {"samples": len(members), "bytes": hashed.bytes, "sha256": hashed.sha256.hexdigest()}


def forget_networks() -> None:
    """Free the networks that this process has loaded."""
    _networks.cache_clear()


@functools.lru_cache(maxsize=1)
def _networks(plan: ConversionSettings) -> _Networks:
    device = device_of_process(plan.device)
    moments = captions = None
    if plan.encodes_pictures:
        moments = MomentsEncoder(plan.vae, plan.checkpoint, plan.digest, device)
    if plan.encodes_captions:
        captions = CaptionEncoder(plan.text, plan.checkpoint, plan.digest, plan.vocabulary, device)
    return _Networks(moments, captions)


def _loaded(source: Path, members: Mapping[str, Sequence[Range]], plan: ConversionSettings) -> Iterator[list[Loaded]]:
    """Yield groups of the samples of a raw tar in the order of their keys, decoded in threads and checked.

    Args:
        members: offset and size of the picture's member and of the caption, by key.
    """
    suffix = FORMS[plan.form]
    with open(source, "rb") as file:
        descriptor = file.fileno()

        def load(key: str) -> Loaded:
            content, caption = (_content(descriptor, member) for member in members[key])
            text = decode_text(caption, f"{source}: {key}.{formats.CAPTION}")
            return _decoded(key, content, text, f"{source}: {key}.{suffix}", plan)

        for group in read_groups(members, load, plan.threads, TOGETHER):
            yield [sample for _, sample in group]


def _content(descriptor: int, position: Range) -> bytes:
    """Read a member without moving the file position, which the threads share."""
    offset, size = position
    return os.pread(descriptor, size, offset)


def _decoded(key: str, content: bytes, caption: str, name: str, plan: ConversionSettings) -> Loaded:
    if FORMS[plan.form] == PICTURE:
        try:
            return Loaded(key, read_picture(content, plan.image_size), None, None, caption)
        except ValueError as error:
            raise DataError(f"{name} is no whole JPEG: {error}; fetch the tar again") from error
    sample = MEMBERS[FORMS[plan.form]].decode(content, plan.shape, name)
    for what, tensor in (("moments", sample.moments_CHW), ("captions", sample.captions_TK)):
        if tensor is not None and not tensor.isfinite().all():
            raise DataError(f"{name}: {what} have values that are not finite; fetch the tar again")
    return Loaded(key, None, sample.moments_CHW, sample.captions_TK, caption)


def _encoded(groups: Iterator[list[Loaded]], plan: ConversionSettings) -> Iterator[tuple[str, bytes, str]]:
    """Yield key, content of the prepared member, and caption."""
    networks = _networks(plan)
    for group in groups:
        moments = [sample.moments_CHW for sample in group]
        captions = [sample.captions_TK for sample in group]
        if networks.moments is not None:
            pictures = [sample.picture_3SS for sample in group if sample.picture_3SS is not None]
            moments = list(networks.moments(torch.stack(pictures)))
        if networks.captions is not None:
            captions = list(networks.captions([sample.caption for sample in group]))
        for sample, moments_CHW, captions_TK in zip(group, moments, captions, strict=True):
            assert moments_CHW is not None
            if plan.member == formats.ENCODED:
                assert captions_TK is not None
                yield sample.key, formats.encode_sample(moments_CHW, captions_TK), sample.caption
            else:
                yield sample.key, formats.encode_moments(moments_CHW.numpy()), sample.caption
