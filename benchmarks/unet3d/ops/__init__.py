"""Operations that only 3D U-Net uses, with one package each, as in :mod:`common.ops`.

Shapes: N samples of the micro-batch, C channels, K classes, D H W axes of the volume, V = D * H * W voxels of a
sample. Activations are channels_last_3d on GPUs, in memory (N, V, C).

If a volume is split over ranks (:class:`common.distributed.spatial.split.VolumeSplit`), each rank passes its slab.
Slabs are equal; sums over a whole volume are sums over the ranks.
"""
