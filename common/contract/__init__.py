"""What a workload promises: model, loss, data, evaluation."""
