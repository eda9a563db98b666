"""Shared fixtures."""

from __future__ import annotations

import os

import pytest


@pytest.fixture
def no_waiting_for_the_disk(monkeypatch):
    """Writing a hundred small files, of which none has to outlive the test, does not wait for the disk."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    monkeypatch.setattr(os, "fdatasync", lambda descriptor: None)
