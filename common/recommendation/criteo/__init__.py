"""Criteo's click logs: raw days to fixed rows in one file for training and one for evaluation, and their reader."""
