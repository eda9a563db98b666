"""Reading what strangers wrote: within bounds, and never executed."""
