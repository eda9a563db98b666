"""Files of others' formats, read and written: RecordIO, TensorFlow's checkpoints, tars in place, JPEG."""
