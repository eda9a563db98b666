"""DeepCAM: segmentation of cyclones and atmospheric rivers in simulated weather with DeepLabv3+."""
