"""The operations of RNN-T alone, a folder each, as those of :mod:`common.ops`.

Legend: B utterances of a micro-batch, T frames at most, U tokens of an utterance at most, V classes with blank, H
hidden size, J channels of the joint network, N packed rows: for every utterance frames x (tokens + 1). Shapes are
static and nothing waits for the device.
"""
