"""Registers ``small-v0`` for whoever names it ``small_world:small-v0``."""

import gymnasium as gym
import train_worlds

if "small-v0" not in gym.registry:
    train_worlds.register_small()
