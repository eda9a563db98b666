"""Storage of a graph and its nodes' features, and gathering of the features for a sampled block."""
