"""How a node does with every workload: the step on some of its GPUs and on all of them, in one table."""
