"""The operations of Mask R-CNN alone, a folder each, as those of :mod:`common.ops`.

Legend: B pictures of the micro-batch, H W height and width of a batch or of a pyramid level, C channels, A anchors of a
picture, R regions of interest of a picture, K classes. Boxes are corners x1, y1, x2, y2 in px. Activations are
channels_last on GPUs. Shapes are static; what depends on the data is a count on the device, for which nothing waits.
"""
