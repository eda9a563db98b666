"""What a run shows of itself: progress, metrics, profiles, summary."""
