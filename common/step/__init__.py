"""One training iteration, captured in a CUDA graph."""
