"""OpenFold: AlphaFold2's initial training, which predicts the structure of a protein from its sequence."""
