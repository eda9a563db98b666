"""GPT-3 175B: pre-training of a language model on C4, starting from the checkpoint of the benchmark."""
