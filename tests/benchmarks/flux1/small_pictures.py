"""A few pictures with captions in the layouts of CC12M and COCO 2014."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import numpy as np
from PIL import Image

from common.data.synthetic import mark

SIDES = [(300, 256), (255, 400), (256, 256), (500, 256), (256, 333), (400, 100), (301, 299), (260, 280)]
TARS = (3, 5)


def jpeg(width: int, height: int, seed: int = 0) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (8, 8, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).resize((width, height), Image.Resampling.BILINEAR).save(file, "JPEG", quality=95)
    return file.getvalue()


def decoded(content: bytes) -> Image.Image:
    return Image.open(io.BytesIO(content)).convert("RGB")


def write_pictures(folder: Path, broken: int | None = None, left_out: str = "3\n", pictures: int = 11) -> Path:
    """Write CC12M's tars and COCO's pictures with captions; return the folder."""
    (folder / "cc12m-wds").mkdir(parents=True)
    (folder / "val2014").mkdir()
    (folder / "annotations").mkdir()
    numbers = iter(range(len(SIDES)))
    for tar_number, count in enumerate(TARS):
        with tarfile.open(folder / "cc12m-wds" / f"cc12m-train-{tar_number:04d}.tar", "w") as tar:
            for number in (next(numbers) for _ in range(count)):
                content = jpeg(*SIDES[number], number)
                content = content[:40] if number == broken else content
                for suffix, data in (("jpg", content), ("json", b"{}"), ("txt", f"caption {number}".encode())):
                    member = tarfile.TarInfo(f"{number:09d}.{suffix}")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
    (folder / "problematic_indices.txt").write_text(left_out)
    rows = []
    for number in range(3 * pictures):
        picture = 100 + 7 * (number % pictures)
        rows.append({"image_id": picture, "id": 1000 - 13 * number, "caption": f" picture {picture},\n text {number} "})
        (folder / "val2014" / f"COCO_val2014_{picture:012d}.jpg").write_bytes(jpeg(100 + picture, 90, picture))
    (folder / "annotations" / "captions_val2014.json").write_text(json.dumps({"annotations": rows}))
    mark(folder, {"text_length": 12, "text_width": 16, "caption_width": 24, "latent_channels": 4, "latent_size": 32})
    return folder
