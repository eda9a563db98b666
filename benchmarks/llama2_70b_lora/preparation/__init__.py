"""Convert text or published rows to rows of token ids."""
