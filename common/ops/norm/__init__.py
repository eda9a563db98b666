"""Functions that batch, instance and other norms share. :mod:`common.ops.tiling` has the passes over tiles."""
