"""The ways to run an evaluation: in line, scored in the background, or on ranks of its own."""
