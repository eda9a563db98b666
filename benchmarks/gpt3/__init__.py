"""GPT-3 175B: pre-training of a language model on C4, from the benchmark's checkpoint on."""
