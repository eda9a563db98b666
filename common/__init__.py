"""What two or more workloads share. Never imports from ``benchmarks``."""
