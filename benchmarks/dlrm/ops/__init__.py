"""Operations that only DLRM uses."""
