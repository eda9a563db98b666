"""Order, shards, prefetch, readers, manifests, preparation."""
