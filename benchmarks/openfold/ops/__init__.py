"""Operations that only OpenFold uses, with one package each, as in :mod:`common.ops`.

Shapes: B samples of the micro-batch, or templates; S sequences of an alignment; N residues; I J the residues of a pair;
P = B I J pairs; H heads; C channels.
"""
