"""HTML report with pictures of training runs."""
