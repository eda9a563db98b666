"""Recommendation workloads: many large embedding tables that are sharded over ranks."""
