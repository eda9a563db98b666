"""The operations of 3D U-Net, a folder each, as those of :mod:`common.ops`.

Legend: N samples of the micro-batch, C channels, K classes, D H W axes of the volume, V = D * H * W voxels of a sample.
Activations are channels_last_3d on GPUs, in memory (N, V, C). Arithmetic is fp32 inside, fp64 for fp64 inputs. Shapes
are static and nothing waits for the device, so every implementation can be captured in a CUDA graph.

Where a volume is split over ranks (:class:`common.distributed.spatial.split.VolumeSplit`), each rank calls with its
slab. Slabs are equal, and the sums over a whole volume are those over the ranks.
"""
