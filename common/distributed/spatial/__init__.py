"""One volume over several GPUs: slabs and their halos, convolutions across them, and gathering of small levels."""
