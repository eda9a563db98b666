"""Boxes in pictures: coding, suppression, annotations, COCO's scores."""
