"""Data order, shards, prefetching, readers, manifests and data preparation."""
