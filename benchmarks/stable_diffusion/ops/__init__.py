"""The operations of Stable Diffusion alone, a folder each, as those of :mod:`common.ops`.

Legend: N pictures of the micro-batch, C channels of a latent, H W its height and width, T times of the schedule.
Latents are channels_last. Arithmetic is fp32 inside, fp64 for fp64. Shapes are static and nothing waits for the
device, so every implementation can be captured in a CUDA graph.
"""
