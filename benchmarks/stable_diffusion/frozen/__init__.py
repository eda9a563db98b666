"""The networks that do not train: VAE, CLIP's two towers, FID's Inception, and the tokenizer before them."""
