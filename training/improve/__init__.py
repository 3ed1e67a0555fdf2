"""A policy is improved from its own runs, in rounds that are kept only where they are proven."""
