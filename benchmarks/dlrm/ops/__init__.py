"""Operations that only DLRM has."""
