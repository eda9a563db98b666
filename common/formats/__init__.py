"""Files of others' formats, read and written: RecordIO, JPEG, tars in place, numpy's, TensorFlow's checkpoints."""
