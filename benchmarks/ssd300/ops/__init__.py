"""The operations of SSD300 alone, a folder each, as those of :mod:`common.ops`.

Legend: N pictures of the micro-batch, H W a level's height and width, C channels, A default boxes of all levels, K
classes with background. Activations are channels_last on GPUs. Shapes are static and nothing waits for the device.
"""
