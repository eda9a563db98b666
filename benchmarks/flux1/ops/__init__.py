"""Operations that only FLUX.1 uses."""
