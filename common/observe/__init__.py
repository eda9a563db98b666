"""Output of a run for its user: progress, metrics, profiles and summary."""
