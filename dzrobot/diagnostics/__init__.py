"""Checks of recordings and devices that a person starts with `dzrobot doctor`."""
