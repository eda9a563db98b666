"""Network modules that several benchmarks share."""
