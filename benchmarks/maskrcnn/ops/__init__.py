"""The operations of Mask R-CNN alone, a folder each, as those of :mod:`common.ops`.

Boxes are corners x1, y1, x2, y2 in px. Activations are channels_last on GPUs. Shapes are static; what depends on the
data is a count on the device, for which nothing waits.
"""
