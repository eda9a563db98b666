"""Start-up, layout, process groups, faults, weights between roles, split volumes."""
