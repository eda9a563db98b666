"""Operations that only Mask R-CNN uses, with one package each, as in :mod:`common.ops`.

Shapes: B pictures of the micro-batch, H W height and width of a batch or of a pyramid level, C channels, A anchors of
a picture, R regions of interest of a picture, K classes. Boxes are corners x1, y1, x2, y2 in px. Activations are
channels_last on GPUs.
"""
