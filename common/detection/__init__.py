"""Boxes in pictures: coding, annotations, COCO's metrics."""
