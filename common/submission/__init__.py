"""Scores, checks and packages of results."""
