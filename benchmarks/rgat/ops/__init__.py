"""Operations that only R-GAT has."""
