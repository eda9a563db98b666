"""Contract between the trainer and a workload: model, loss, data and evaluation."""
