"""Layers dealt to stages that micro-batches pass through one after the other, on the axis ``pp``."""
