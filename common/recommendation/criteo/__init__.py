"""Criteo's click logs: preparation into one file of rows for training and one for evaluation, and their reader."""
