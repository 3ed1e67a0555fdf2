"""Training curves: losses and success against the step, as PNG files and as one page."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from dzrobot.documents import read_json, read_json_lines
from dzrobot.errors import DatasetError
from dzrobot.files import write_bytes, write_text
from dzrobot.plots import drawn, new_plot
from dzrobot.rollout.evaluation.report import STEPS_FILE, StepScore
from dzrobot.training.run.loggers import METRICS_FILE, SUCCESS

LOSSES = ("loss", "dynamics_loss", "action_loss")


class _LoggedStep(BaseModel):
    """A line of a run's metrics, in the part that is drawn."""

    model_config = ConfigDict(strict=True)

    step: int = Field(ge=0)
    loss: float | None = None
    dynamics_loss: float | None = None
    action_loss: float | None = None
    success: float | None = Field(default=None, validation_alias=SUCCESS)

    def value(self, name: str) -> float | None:
        """Return the metric ``name``."""
        found: float | None = getattr(self, "success" if name == SUCCESS else name)
        return found


@dataclass(frozen=True)
class Curve:
    """One line of a plot."""

    name: str
    steps: list[int]
    values: list[float]
    bounds: tuple[list[float], list[float]] | None = None
    """Lower and upper end of each value's interval, if any."""


def read_curves(run: Path) -> dict[str, list[Curve]]:
    """Return the curves of a run: title of the plot -> lines.

    Args:
        run: Folder of a training run, or of an evaluation over its steps.

    Raises:
        DatasetError: There is nothing to draw in it, or a file is damaged.
    """
    found: dict[str, list[Curve]] = {}
    rows = _metrics(run / METRICS_FILE)
    for name in (*LOSSES, SUCCESS):
        # The later line counts where a step was done again.
        kept = {row.step: value for row in rows if (value := row.value(name)) is not None}
        if kept:
            title = "success" if name == SUCCESS else name
            found[title] = [Curve(f"{run.name} (in the loop)" if name == SUCCESS else run.name,
                                  list(kept), list(kept.values()))]  # fmt: skip
    for file in sorted([*run.glob(STEPS_FILE), *run.glob(f"evaluations/*/{STEPS_FILE}")]):
        scores = sorted(
            read_json(file, list[StepScore], DatasetError), key=lambda score: score.step
        )
        low, high = zip(*(score.interval for score in scores), strict=True) if scores else ((), ())
        curve = Curve(
            f"{run.name}, {file.parent.name}" if file.parent != run else run.name,
            [score.step for score in scores],
            [score.successes / max(1, score.episodes) for score in scores],
            (list(low), list(high)),
        )
        found.setdefault("success", []).append(curve)
    if not found:
        raise DatasetError(
            f"{run} holds nothing to draw: give the folder of a training run ({METRICS_FILE}), or "
            f"of `dzrobot eval --steps` ({STEPS_FILE})"
        )
    return found


def _metrics(file: Path) -> list[_LoggedStep]:
    """Return the lines of a run's log; a trainer may be writing the last one."""
    if not file.is_file():
        return []
    return list(read_json_lines(file, _LoggedStep, DatasetError, appended=True))


def draw(runs: Sequence[Path], output: Path) -> list[Path]:
    """Draw the curves of ``runs`` together; return what was written.

    Args:
        runs: See :func:`read_curves`.
        output: Folder for a PNG of each plot and ``index.html`` with all of them.

    Raises:
        DatasetError: See :func:`read_curves`.
        MissingDependencyError: matplotlib is not installed.
    """
    plots: dict[str, list[Curve]] = {}
    for run in runs:
        for title, curves in read_curves(run).items():
            plots.setdefault(title, []).extend(curves)
    written, figures = [], {}
    for title, curves in plots.items():
        images = _figure(title, curves)
        path = output / f"{title}.png"
        write_bytes(path, images["png"])
        written.append(path)
        figures[title] = images["svg"].decode()
    page = output / "index.html"
    write_text(page, _page([run.name for run in runs], figures, plots))
    return [*written, page]


def _figure(title: str, curves: Sequence[Curve]) -> dict[str, bytes]:
    """Return one plot as PNG and as SVG."""
    figure, axes = new_plot()
    for curve in curves:
        mark = "o" if curve.bounds is not None or len(curve.steps) == 1 else None
        (line,) = axes.plot(curve.steps, curve.values, marker=mark, label=curve.name)
        if curve.bounds is not None:
            axes.fill_between(curve.steps, *curve.bounds, alpha=0.2, color=line.get_color())
    axes.set_xlabel("training step")
    axes.set_ylabel(title)
    if title == "success":
        axes.set_ylim(-0.03, 1.03)
        axes.set_title("success by training step (95 % intervals); the best is selected on these")
    axes.grid(alpha=0.3)
    axes.legend()
    return drawn(figure)


def _page(
    names: Sequence[str], figures: Mapping[str, str], plots: Mapping[str, Sequence[Curve]]
) -> str:
    from jinja2 import Environment

    # Names are those of the user's folders: markup in them is escaped.
    template = Environment(autoescape=True).from_string(_TEMPLATE)
    inner = {title: svg[svg.index("<svg") :] for title, svg in figures.items()}
    tables = [(curve, list(_rows(curve))) for curve in plots.get("success", [])]
    return template.render(names=names, figures=inner, tables=tables)


def _rows(curve: Curve) -> Iterator[tuple[str, str, str]]:
    """Yield step, success and interval of each value, as text."""
    for i, (step, value) in enumerate(zip(curve.steps, curve.values, strict=True)):
        interval = ""
        if curve.bounds is not None:
            low, high = (100 * ends[i] for ends in curve.bounds)
            interval = f"{low:.1f} to {high:.1f}"
        yield str(step), f"{100 * value:.1f} %", interval


_TEMPLATE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{{ names | join(", ") }}</title>
<style>
body { font-family: sans-serif; max-width: 60em; margin: 2em auto }
svg { width: 100%; height: auto }
td, th { padding: 0.2em 1em; text-align: right }
</style></head><body>
<h1>{{ names | join(", ") }}</h1>
{% for curve, rows in tables %}<h2>Success by training step: {{ curve.name }}</h2>
<table><tr><th>step</th><th>success</th><th>95 % interval</th></tr>
{% for row in rows %}<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}</table>{% endfor %}
{% for title, figure in figures.items() %}<h2>{{ title }}</h2>{{ figure | safe }}{% endfor %}
</body></html>
"""
