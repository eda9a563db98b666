"""CosmoFlow: a 3D convolutional network predicts cosmological parameters from cubes of dark matter."""
