"""Evaluations that a command runs: one of them, or a study over several variants."""
