"""Checkers of reference numbers, one module per part of the model; see ``registry``."""
