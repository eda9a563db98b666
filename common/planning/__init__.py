"""Planning before runs: which training runs when, on how many GPUs."""
