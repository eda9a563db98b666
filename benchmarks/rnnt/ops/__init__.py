"""Operations that only RNN-T uses, one package each, like those of :mod:`common.ops`.

Shapes: T spliced frames of an utterance, S frames after pairs are joined, U tokens, B utterances of the micro-batch,
F features of a frame, H a width, V classes of which blank is the last, R rows (b, s, u) of all utterances back to
back. T, U and R are capacities. The real lengths are on the device.
"""
