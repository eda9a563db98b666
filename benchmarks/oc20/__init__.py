"""OpenCatalyst 2020: a graph network predicts the forces on adsorbates and catalysts."""
