"""Evaluations: protocols, records, results that can be trusted and interrupted runs that resume."""
