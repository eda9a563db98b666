"""Operations that only RNN-T uses, one package each, like those of :mod:`common.ops`.

Legend: T spliced frames of an utterance, S frames after pairs are joined, U tokens, B utterances of the micro-batch,
F features of a frame, H a width, V classes of which blank is the last, R rows (b, s, u) of all utterances back to
back. Shapes are static: T, U and R are capacities. The real lengths are numbers on the device, for which nothing
waits.
"""
