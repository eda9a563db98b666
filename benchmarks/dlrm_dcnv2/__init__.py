"""DLRM-DCNv2 on multi-hot Criteo: a recommendation model with a low-rank cross network."""
