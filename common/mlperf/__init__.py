"""Rules, schedules, logs, verdicts, reference convergence points."""
