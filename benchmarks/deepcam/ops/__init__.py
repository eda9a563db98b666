"""Operations that only DeepCAM uses, with one package each, as in :mod:`common.ops`."""
