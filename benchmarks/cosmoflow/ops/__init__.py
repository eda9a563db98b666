"""Operations that only CosmoFlow uses, with one package each, as in :mod:`common.ops`.

Shapes: N samples of the micro-batch, C channels, D H W axes of the volume. Activations are channels_last_3d in memory:
(N, D, H, W, C).
"""
