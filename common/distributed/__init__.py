"""Job start-up, rank layout, process groups, fault detection, weight transfer between roles, and split volumes."""
