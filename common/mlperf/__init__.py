"""MLPerf rules in code: evaluation schedules, logs, verdicts and reference convergence points (RCPs)."""
