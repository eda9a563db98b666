"""OpenFold: AlphaFold 2's initial training of protein structure prediction."""
