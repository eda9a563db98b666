"""Spatial parallelism of one volume over several GPUs: slabs, halos, split convolutions, gathering of small levels."""
