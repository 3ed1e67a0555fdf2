"""Policies in environments: one episode, or an evaluation that can be trusted and gone on with."""

from dzrobot.rollout.episode import EpisodeRules, Outcome, run_episode

__all__ = ["EpisodeRules", "Outcome", "run_episode"]
