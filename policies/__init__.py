"""Policies: the protocol, and DreamZero."""

from typing import TYPE_CHECKING

from dzrobot.importing import lazy_exports

if __name__ != "dzrobot.policies":
    raise ImportError(
        f"this package is dzrobot.policies, not {__name__}: write `import dzrobot.policies`"
    )

if TYPE_CHECKING:
    from dzrobot.policies.base import Abilities, Ask, Plan, Policy
    from dzrobot.policies.dreamzero.bundled import default_checkpoint
    from dzrobot.policies.dreamzero.options import PolicyOptions
    from dzrobot.policies.dreamzero.policy import DreamZeroPolicy
    from dzrobot.policies.serving.remote_policy import RemotePolicy
    from dzrobot.policies.wrapping import Wrapper

__all__ = [
    "Abilities",
    "Ask",
    "DreamZeroPolicy",
    "Plan",
    "Policy",
    "PolicyOptions",
    "RemotePolicy",
    "Wrapper",
    "default_checkpoint",
]

__getattr__, __dir__ = lazy_exports(__name__)
