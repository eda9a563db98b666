"""Check a machine, or every node of a job, before runs."""
