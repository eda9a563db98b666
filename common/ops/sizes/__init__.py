"""Sizes of the recipes, which cases of operations and tests share."""
