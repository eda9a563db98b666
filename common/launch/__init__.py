"""Series of runs: the registry, binding, sources, Slurm tasks."""
