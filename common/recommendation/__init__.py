"""What workloads of recommendation share: many large embedding tables, dealt over ranks."""
