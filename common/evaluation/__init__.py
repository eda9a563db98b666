"""The ways to run an evaluation: in line, or on ranks of its own."""
