"""Demonstrations: episodes that become datasets, driven by a person or by a privileged policy."""
