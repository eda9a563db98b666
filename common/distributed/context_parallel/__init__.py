"""Context parallelism (``cp``): each row of tokens is sharded over several ranks."""
