"""Llama-2-70B LoRA: fine-tuning of a frozen language model on government reports and their summaries."""
