"""Characterise workloads on this machine: kernels, roofline, variants of the step, in one page."""
