"""Tiny T5, CLIP and AutoencoderKL with random weights, saved as the repository of FLUX.1-schnell has them."""

from __future__ import annotations

import json
from pathlib import Path

import sentencepiece
import torch
from diffusers import AutoencoderKL
from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

SIZES = {"text_length": 12, "text_width": 16, "caption_width": 24, "latent_channels": 4, "latent_size": 32}
CAPTIONS = [
    "a red circle on a black table",
    "two dogs",
    "a street with many cars, and a long caption of many words " * 3,
]


def write_encoders(folder: Path, caption_width: int = SIZES["caption_width"]) -> Path:
    """Write all networks and tokenizers; return the folder."""
    torch.manual_seed(3)
    _write_t5_tokenizer(folder / "tokenizer_2")
    _write_clip_tokenizer(folder / "tokenizer")
    t5 = T5EncoderModel(
        T5Config(
            vocab_size=64, d_model=16, d_kv=4, d_ff=32, num_layers=2, num_heads=2, feed_forward_proj="gated-gelu",
        )
    )  # fmt: skip
    t5.save_pretrained(folder / "text_encoder_2", max_shard_size="12KB")
    vocabulary = json.loads((folder / "tokenizer" / "vocab.json").read_text())
    clip = CLIPTextModel(
        CLIPTextConfig(
            vocab_size=len(vocabulary), hidden_size=caption_width, intermediate_size=32, projection_dim=8,
            num_hidden_layers=2, num_attention_heads=2, bos_token_id=vocabulary["<|startoftext|>"],
            eos_token_id=vocabulary["<|endoftext|>"], pad_token_id=vocabulary["<|endoftext|>"],
        )
    )  # fmt: skip
    clip.save_pretrained(folder / "text_encoder")
    vae = AutoencoderKL(
        down_block_types=["DownEncoderBlock2D"] * 4, up_block_types=["UpDecoderBlock2D"] * 4,
        block_out_channels=[4, 4, 8, 8], layers_per_block=1, latent_channels=4, norm_num_groups=2,
        use_quant_conv=False, use_post_quant_conv=False,
    )  # fmt: skip
    vae.save_pretrained(folder / "vae")
    return folder


def _write_t5_tokenizer(folder: Path) -> None:
    folder.mkdir(parents=True)
    text = folder / "text.txt"
    text.write_text("\n".join(CAPTIONS * 4), encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(text), model_prefix=str(folder / "spiece"), vocab_size=36, model_type="unigram", pad_id=0, eos_id=1,
        unk_id=2, bos_id=-1, minloglevel=2,
    )  # fmt: skip
    text.unlink()


def _write_clip_tokenizer(folder: Path) -> None:
    folder.mkdir()
    letters = sorted(set("".join(CAPTIONS)) - {" "})
    names = [*letters, *(f"{letter}</w>" for letter in letters), "re", "red</w>", "<|startoftext|>", "<|endoftext|>"]
    (folder / "vocab.json").write_text(json.dumps({name: number for number, name in enumerate(names)}))
    (folder / "merges.txt").write_text("#version: 0.2\nr e\nre d</w>\n")
    config = {"tokenizer_class": "CLIPTokenizer", "model_max_length": 77, "bos_token": "<|startoftext|>"}
    config |= {"eos_token": "<|endoftext|>", "unk_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
