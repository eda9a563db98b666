"""One row of tokens over several ranks: the ``cp`` axis."""
