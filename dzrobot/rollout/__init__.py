"""Policies in environments: one episode, or an evaluation that can be trusted and resumed."""

from typing import TYPE_CHECKING

from dzrobot.importing import lazy_exports

if TYPE_CHECKING:
    from dzrobot.rollout.episode import EpisodeResult, run_episode
    from dzrobot.rollout.evaluation.comparison import Comparison, Results, compare, read_results
    from dzrobot.rollout.evaluation.evaluate import EvalProgress, conclude, evaluate, merge, run
    from dzrobot.rollout.evaluation.planning import (
        EvaluationPlan,
        EvaluationRequest,
        Opened,
        RunOptions,
        open_plan,
        plan,
        prepare,
    )
    from dzrobot.rollout.policy_spec import PolicySpec
    from dzrobot.rollout.protocol import PROTOCOLS, EpisodeRules, EvalSpec, Protocol

__all__ = [
    "PROTOCOLS",
    "Comparison",
    "EpisodeResult",
    "EpisodeRules",
    "EvalProgress",
    "EvalSpec",
    "EvaluationPlan",
    "EvaluationRequest",
    "Opened",
    "PolicySpec",
    "Protocol",
    "Results",
    "RunOptions",
    "compare",
    "conclude",
    "evaluate",
    "merge",
    "open_plan",
    "plan",
    "prepare",
    "read_results",
    "run",
    "run_episode",
]

__getattr__, __dir__ = lazy_exports(__name__)
