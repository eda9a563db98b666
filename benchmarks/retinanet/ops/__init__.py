"""Operations that only RetinaNet uses, with one folder each, as in :mod:`common.ops`.

Legend: N pictures of the micro-batch, H W height and width of a level, C channels, A anchors of a level, K classes.
Activations are channels_last on GPUs. Arithmetic is fp32, or fp64 for fp64 inputs. Shapes are static and nothing waits
for the device, so that every implementation can be captured in a CUDA graph.
"""
