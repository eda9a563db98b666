"""FLUX.1-schnell: text to image by a diffusion transformer (https://github.com/black-forest-labs/flux)."""
