"""Where a graph and the features of its nodes lie, and how a sampled block gets its rows."""
