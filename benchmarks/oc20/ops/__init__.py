"""Operations that only OpenCatalyst uses, with one package each, as in :mod:`common.ops`."""
