"""One layer over several ranks: the ``tp`` axis, with the tokens between the layers dealt to the same ranks."""
