"""Policies over the network: the server, and the policy whose network runs on another machine.

Nothing here imports torch: the machine beside the robot need not have it.
"""
