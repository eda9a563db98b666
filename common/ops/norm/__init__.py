"""What batch, instance and other norms share; the passes over tiles are in :mod:`common.ops.tiling`."""
