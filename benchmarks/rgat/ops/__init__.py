"""Operations that only R-GAT uses."""
