"""R-GAT on IGBH: a relational graph attention network that classifies papers."""
