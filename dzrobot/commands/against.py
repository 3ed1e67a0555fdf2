"""``dzrobot eval --against RESULTS``: beside earlier results, and no longer than it takes."""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console

from dzrobot.commands.compare import show_comparison
from dzrobot.commands.options import flags
from dzrobot.errors import ConfigError
from dzrobot.rollout.evaluation.comparison import (
    Results,
    check_same_conditions,
    compare,
    decided_after,
    read_results,
)
from dzrobot.rollout.evaluation.evaluate import RunOptions
from dzrobot.rollout.records import Record


def add_against(group: Any) -> None:
    """Declare ``--against`` and ``--stop-early``."""
    group.add_argument(
        "--against", type=flags.path, metavar="RESULTS",
        help="of the same episodes: compare with them at the end",
    )  # fmt: skip
    group.add_argument(
        "--stop-early", action="store_true",
        help="with --against: end as soon as the difference is decided at the 5 %% level",
    )  # fmt: skip


@dataclass(frozen=True)
class Against:
    """Earlier results that an evaluation is compared with."""

    base: Results
    stop_early: bool

    def options(self, options: RunOptions, card: Mapping[str, Any]) -> RunOptions:
        """Return ``options`` with the rule that ends the run.

        Raises:
            ProtocolError: the evaluation of ``card`` is of other conditions.
        """
        check_same_conditions(self.base, card, "asked for now")
        return replace(options, enough=self._enough) if self.stop_early else options

    def decided(self, own: Results) -> bool:
        """Return whether the run ended because enough was known."""
        return self.stop_early and self._enough(own.records)

    def conclude(self, console: Console, own: Results) -> None:
        """Print the comparison, where there is anything to compare."""
        if not any(name in own.finished for name in self.base.finished):
            return
        show_comparison(console, compare([self.base, own]))
        if not self.stop_early:
            return
        pairs = decided_after(self.base, own.records)
        said = "not decided" if pairs is None else f"decided after {pairs} pairs"
        console.print(
            f"{said} of {len(self.base.cases)}, at the 5 % level however often one looks (e-value "
            "of 20). A rate from a run that ended early leans to the side that won; the verdict "
            "does not.",
            markup=False, soft_wrap=True,
        )  # fmt: skip

    def _enough(self, records: Mapping[str, Record]) -> bool:
        return decided_after(self.base, records) is not None


def read_against(arguments: argparse.Namespace) -> Against | None:
    """Return what the evaluation is compared with; None: nothing.

    Raises:
        ConfigError: the flags do not go together.
        ProtocolError: there are no results.
    """
    if arguments.against is None:
        if arguments.stop_early:
            raise ConfigError("--stop-early needs --against RESULTS, to know what to decide")
        return None
    if arguments.stop_early and arguments.shard != (0, 1):
        raise ConfigError("--stop-early looks at the pairs in their order: leave --shard out")
    return Against(read_results(arguments.against), arguments.stop_early)
