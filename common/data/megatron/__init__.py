"""Rows of tokens for the pre-training of language models, in Megatron's file format."""
