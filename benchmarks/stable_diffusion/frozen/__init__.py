"""The frozen networks: VAE, both towers of CLIP, and FID's Inception; with CLIP's tokenizer."""
