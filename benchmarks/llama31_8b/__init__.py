"""Llama 3.1 8B: pre-training of a language model from random weights on C4."""
