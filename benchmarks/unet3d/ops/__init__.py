"""The operations of 3D U-Net, one package each, with the same structure as :mod:`common.ops`.

Legend: N samples of the micro-batch, C channels, K classes, D H W axes of the volume, V = D * H * W voxels of a
sample. Activations are channels_last_3d on GPUs, in memory (N, V, C). Arithmetic is fp32 inside, fp64 for fp64
inputs. Shapes are static and no operation waits for the device, so every implementation can be captured in a CUDA
graph.

If a volume is split over ranks (:class:`common.distributed.spatial.split.VolumeSplit`), each rank passes its slab.
Slabs are equal; sums over a whole volume are sums over the ranks.
"""
