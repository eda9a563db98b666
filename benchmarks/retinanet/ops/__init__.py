"""Operations that only RetinaNet uses, with one package each, as in :mod:`common.ops`.

Shapes: N pictures of the micro-batch, H W height and width of a level, C channels, A anchors of a level, K classes.
Activations are channels_last on GPUs.
"""
