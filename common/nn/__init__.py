"""Modules that several networks use."""
