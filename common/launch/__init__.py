"""Series of runs: their registry, CPU and memory binding, source revision, and Slurm tasks."""
