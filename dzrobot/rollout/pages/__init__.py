"""Evaluations as pages that a browser opens from disk."""
