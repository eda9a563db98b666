"""Sizes of the recipes. Cases of operations and tests share them."""
