"""The operations of Mask R-CNN alone, a folder each, as those of :mod:`common.ops`.

Shapes are static and nothing waits for the device, so every version can be captured in a CUDA graph.
"""
