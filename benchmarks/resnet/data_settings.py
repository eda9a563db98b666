"""How pictures become tensors: what both readers of ResNet-50's data are told."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from common.errors import ConfigError

READERS = ("auto", "dali", "torchvision")
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True)
class BufferHints:
    """Sizes that DALI allocates ahead, so that no allocation happens in the middle of training.

    Defaults: the largest ImageNet picture, and 1.1 times the mean bytes of each stage at 224 px (NVIDIA's MLPerf
    v4.0 submission).

    Attributes:
        decoder_width: px, of the hardware decoder's buffer.
        decoder_height: px, of the hardware decoder's buffer.
        decoded_bytes: per sample.
        cropped_bytes: per sample.
        normalized_bytes: per sample.
        resize_bytes_per_sample: temporary buffer of the resize, times the batch; 871,491 B is the mean.
        device_padding_bytes: of nvJPEG's device buffers.
        host_padding_bytes: of nvJPEG's pinned buffers.
        pinned_pool_bytes: pinned memory taken at once; 0 leaves it to DALI.
    """

    decoder_width: int = 5980
    decoder_height: int = 6430
    decoded_bytes: int = 1_315_942
    cropped_bytes: int = 165_581
    normalized_bytes: int = 441_549
    resize_bytes_per_sample: int = 871_491
    device_padding_bytes: int = 256 << 20
    host_padding_bytes: int = 256 << 20
    pinned_pool_bytes: int = 0


@dataclass(frozen=True)
class DataSettings:
    """Reader and transforms.

    Attributes:
        reader: ``dali``, ``torchvision``, or ``auto``: DALI when it is importable.
        classes: labels are below it.
        image_size: px of the square that the network sees.
        eval_resize: px of the shorter side before the centre crop.
        crop_area: smallest and largest share of the picture that a training crop covers.
        crop_aspect: smallest and largest width / height of a training crop.
        mirror: probability of a horizontal flip.
        mean: per channel R, G, B, on the scale 0 to 255.
        std: per channel, on the scale 0 to 255.
        channels: of the output; those beyond 3 are zero.
        dtype: ``float16``, ``bfloat16`` or ``float32``.
        threads: CPU threads of the reader.
        prefetch: batches made ahead.
        hw_decoder_load: share of pictures for the GPU's JPEG engine (DALI).
        cache_mb: DALI on a GPU: decoded training pictures kept in GPU memory; 0 decodes only the crop.
        input_batch_multiplier: DALI makes this many micro-batches at once.
        shuffle_buffer: records that DALI draws the next one from.
        dont_use_mmap: DALI reads instead of mapping; for network file systems.
        hints: sizes of DALI's buffers.
    """

    reader: str = "auto"
    classes: int = 1000
    image_size: int = 224
    eval_resize: int = 256
    crop_area: tuple[float, float] = (0.05, 1.0)
    crop_aspect: tuple[float, float] = (3 / 4, 4 / 3)
    mirror: float = 0.5
    mean: tuple[float, float, float] = (123.675, 116.28, 103.53)
    std: tuple[float, float, float] = (58.395, 57.12, 57.375)
    channels: int = 4
    dtype: str = "float16"
    threads: int = 6
    prefetch: int = 5
    hw_decoder_load: float = 0.99
    cache_mb: int = 0
    input_batch_multiplier: int = 1
    shuffle_buffer: int = 10_000
    dont_use_mmap: bool = False
    hints: BufferHints = field(default_factory=BufferHints)

    def __post_init__(self) -> None:
        for name, ok, need in (
            ("reader", self.reader in READERS, f"one of {', '.join(READERS)}"),
            ("dtype", self.dtype in DTYPES, f"one of {', '.join(DTYPES)}"),
            ("channels", self.channels >= 3, "at least 3"),
            ("eval_resize", self.eval_resize >= self.image_size > 0, f"at least image_size={self.image_size}"),
            ("crop_area", 0 < self.crop_area[0] <= self.crop_area[1] <= 1, "within (0, 1], ascending"),
            ("crop_aspect", 0 < self.crop_aspect[0] <= self.crop_aspect[1], "positive, ascending"),
            ("mirror", 0 <= self.mirror <= 1, "a probability"),
            ("hw_decoder_load", 0 <= self.hw_decoder_load <= 1, "a share"),
            ("std", min(self.std) > 0, "positive"),
            ("threads", self.threads >= 1, "at least 1"),
            ("prefetch", self.prefetch >= 1, "at least 1"),
            ("classes", self.classes >= 1, "at least 1"),
            ("cache_mb", self.cache_mb >= 0, "not negative"),
            ("input_batch_multiplier", self.input_batch_multiplier >= 1, "at least 1"),
            ("shuffle_buffer", self.shuffle_buffer >= 1, "at least 1"),
        ):
            if not ok:
                raise ConfigError(f"data.{name}={getattr(self, name)!r}: it must be {need}")

    @property
    def torch_dtype(self) -> torch.dtype:
        """``dtype`` as PyTorch's."""
        return DTYPES[self.dtype]
