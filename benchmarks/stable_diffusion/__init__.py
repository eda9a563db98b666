"""Stable Diffusion v2: text to image, the U-Net trained on latents."""
