"""Policies in environments: one episode, or an evaluation that can be trusted and gone on with."""

from dzrobot.rollout.episode import EpisodeResult, EpisodeRules, run_episode

__all__ = ["EpisodeResult", "EpisodeRules", "run_episode"]
