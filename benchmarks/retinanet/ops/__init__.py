"""The operations of RetinaNet alone, a folder each, as those of :mod:`common.ops`.

Legend: N pictures of the micro-batch, H W a level's height and width, C channels, A anchors of a level, K classes.
Activations are channels_last on GPUs. Arithmetic is fp32 inside, fp64 for fp64 inputs. Shapes are static and nothing
waits for the device, so every implementation can be captured in a CUDA graph.
"""
