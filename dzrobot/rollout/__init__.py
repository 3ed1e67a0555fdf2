"""Policies in environments: one episode, or an evaluation that can be trusted and resumed."""

from typing import TYPE_CHECKING

from dzrobot.importing import lazy_exports

if TYPE_CHECKING:
    from dzrobot.rollout.episode import EpisodeResult, EpisodeRules, run_episode
    from dzrobot.rollout.evaluation.comparison import Comparison, Results, compare, read_results
    from dzrobot.rollout.evaluation.evaluate import (
        EvalProgress,
        Evaluation,
        PreparedEvaluation,
        RunOptions,
        evaluate,
        merge,
        prepare,
    )
    from dzrobot.rollout.policy_spec import PolicySpec
    from dzrobot.rollout.protocol import PROTOCOLS, EvalSpec, Protocol

__all__ = [
    "PROTOCOLS",
    "Comparison",
    "EpisodeResult",
    "EpisodeRules",
    "EvalProgress",
    "EvalSpec",
    "Evaluation",
    "PolicySpec",
    "PreparedEvaluation",
    "Protocol",
    "Results",
    "RunOptions",
    "compare",
    "evaluate",
    "merge",
    "prepare",
    "read_results",
    "run_episode",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "Comparison": "dzrobot.rollout.evaluation.comparison",
        "EpisodeResult": "dzrobot.rollout.episode",
        "EpisodeRules": "dzrobot.rollout.episode",
        "EvalProgress": "dzrobot.rollout.evaluation.evaluate",
        "EvalSpec": "dzrobot.rollout.protocol",
        "Evaluation": "dzrobot.rollout.evaluation.evaluate",
        "PROTOCOLS": "dzrobot.rollout.protocol",
        "PolicySpec": "dzrobot.rollout.policy_spec",
        "PreparedEvaluation": "dzrobot.rollout.evaluation.evaluate",
        "Protocol": "dzrobot.rollout.protocol",
        "Results": "dzrobot.rollout.evaluation.comparison",
        "RunOptions": "dzrobot.rollout.evaluation.evaluate",
        "compare": "dzrobot.rollout.evaluation.comparison",
        "evaluate": "dzrobot.rollout.evaluation.evaluate",
        "merge": "dzrobot.rollout.evaluation.evaluate",
        "prepare": "dzrobot.rollout.evaluation.evaluate",
        "read_results": "dzrobot.rollout.evaluation.comparison",
        "run_episode": "dzrobot.rollout.episode",
    },
)
