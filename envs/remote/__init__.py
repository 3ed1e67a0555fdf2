"""Environments that run in another process, in another Python environment, on another machine."""
