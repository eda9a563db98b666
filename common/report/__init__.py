"""A page with pictures of runs."""
