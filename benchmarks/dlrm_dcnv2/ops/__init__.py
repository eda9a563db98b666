"""Operations that only DLRM-DCNv2 uses."""
