"""The operations of Mask R-CNN alone, a folder each, as those of :mod:`common.ops`.

Legend: B pictures of the micro-batch, H W height and width of a batch or of a pyramid level, C channels, A anchors of a
picture, R regions of interest of a picture, K classes. Activations are channels_last on GPUs. Shapes are static and
nothing waits for the device, so every version can be captured in a CUDA graph.
"""
