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

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "Comparison": "dzrobot.rollout.evaluation.comparison",
        "EpisodeResult": "dzrobot.rollout.episode",
        "EpisodeRules": "dzrobot.rollout.protocol",
        "EvalProgress": "dzrobot.rollout.evaluation.evaluate",
        "EvalSpec": "dzrobot.rollout.protocol",
        "EvaluationRequest": "dzrobot.rollout.evaluation.planning",
        "Opened": "dzrobot.rollout.evaluation.planning",
        "PROTOCOLS": "dzrobot.rollout.protocol",
        "EvaluationPlan": "dzrobot.rollout.evaluation.planning",
        "PolicySpec": "dzrobot.rollout.policy_spec",
        "Protocol": "dzrobot.rollout.protocol",
        "Results": "dzrobot.rollout.evaluation.comparison",
        "RunOptions": "dzrobot.rollout.evaluation.planning",
        "compare": "dzrobot.rollout.evaluation.comparison",
        "conclude": "dzrobot.rollout.evaluation.evaluate",
        "evaluate": "dzrobot.rollout.evaluation.evaluate",
        "merge": "dzrobot.rollout.evaluation.evaluate",
        "open_plan": "dzrobot.rollout.evaluation.planning",
        "plan": "dzrobot.rollout.evaluation.planning",
        "prepare": "dzrobot.rollout.evaluation.planning",
        "read_results": "dzrobot.rollout.evaluation.comparison",
        "run": "dzrobot.rollout.evaluation.evaluate",
        "run_episode": "dzrobot.rollout.episode",
    },
)
