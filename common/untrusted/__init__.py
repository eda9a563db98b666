"""Reading of untrusted files: within bounds, and without executing anything in them."""
