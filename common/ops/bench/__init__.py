"""What measures operations on a GPU: stopwatch, worker and its supervisor, the table, and sizes of recipes."""
