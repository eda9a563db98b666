"""DLRM on Criteo Terabyte: a recommendation model with the dot interaction."""
