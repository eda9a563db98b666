"""Readers and writers of external formats: RecordIO, JPEG, tar, NumPy, safetensors, Zarr, TensorFlow checkpoints."""
