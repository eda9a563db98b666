"""Preparation of raw days of click logs, stage by stage, in bounded memory."""
