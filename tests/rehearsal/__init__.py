"""Runs of the real code on devices without memory: what a step or a plan would do on a GPU.

Shared by tests and benchmarks. What is counted are operators, operations and bytes, never seconds.
"""
