"""The operations of RNN-T alone, a folder each, as those of :mod:`common.ops`.

Legend: T spliced frames of an utterance, S frames after two of them are joined, U tokens, B utterances of the
micro-batch, F features of a frame, H a width, V classes of which blank is the last, R rows (b, s, u) of all utterances
back to back. Shapes are static: T, U and R are capacities, and what an utterance really has is a number on the device,
for which nothing waits.
"""
