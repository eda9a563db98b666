"""Score, check and package benchmark results for submission."""
