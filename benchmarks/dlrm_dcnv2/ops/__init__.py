"""Operations that only DLRM-DCNv2 has."""
