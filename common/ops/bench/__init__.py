"""What measures operations on a GPU: stopwatch, cases, a supervisor that outlives them, sweeps, the table."""
