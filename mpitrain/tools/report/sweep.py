"""The page of a sweep: its best trials, and Optuna's plots."""

from __future__ import annotations

import base64
import io
from html import escape
from pathlib import Path
from typing import Any

import optuna
from matplotlib import pyplot as plt
from optuna.importance import PedAnovaImportanceEvaluator
from optuna.trial import TrialState
from optuna.visualization import matplotlib as plots

from mpitrain._version import __version__
from mpitrain.record.run_dir import read_result
from mpitrain.tools.report.page import details, read_file, style_sheet
from mpitrain.tools.report.summary import Section
from mpitrain.tools.sweep.study import finished_trials, load_study, name_of

MAX_ROWS = 30


def sweep_page(path: Path) -> tuple[str, dict[str, bytes]]:
    """Return the page of a sweep folder, and its pictures by name."""
    study, result = load_study(path), read_result(path)
    name, plots_by_name = path.absolute().name, _plots(study)
    figures = [
        f'<figure id="{it}" class="wide"><img alt="{it}" style="width: 100%" '
        f'src="data:image/png;base64,{base64.b64encode(data).decode()}"></figure>'
        for it, data in plots_by_name.items()
    ]
    said = str(result.get("error") or result.get("stopped") or "")
    text = read_file("page.html").format(
        title=escape(name),
        style=style_sheet(),
        head=f"<h1>{escape(name)}</h1>",
        status=escape(str(result.get("summary") or result.get("status"))),
        errors=f'<div class="error">{escape(said)}</div>' if said else "",
        tiles="",
        charts="\n".join(figures),
        tables="\n".join(details(it) for it in _tables(study) if it.rows),
        version=__version__,
    )
    return text, plots_by_name


def _plots(study: optuna.Study) -> dict[str, bytes]:
    names = study.metric_names or ["value"]
    finished = finished_trials(study)
    target: dict[str, Any] = {"target_name": names[0]}
    if len(names) > 1:
        target["target"] = lambda trial: trial.values[0]
    found = {}
    if finished:
        found["history"] = plots.plot_optimization_history(study, **target)
        found["parallel"] = plots.plot_parallel_coordinate(study, **target)
    if finished and len(names) in (2, 3):
        found["pareto"] = plots.plot_pareto_front(study, target_names=names)
    if len({tuple(trial.values) for trial in finished}) > 1:
        target["evaluator"] = PedAnovaImportanceEvaluator()
        found["importance"] = plots.plot_param_importances(study, **target)
    return {name: _png(axes) for name, axes in found.items()}


def _png(axes: Any) -> bytes:
    out = io.BytesIO()
    figure = axes.get_figure(root=True)
    figure.set_size_inches(11, 4)
    figure.savefig(out, format="png", dpi=150, bbox_inches="tight", facecolor="white")
    plt.close(figure)  # Optuna draws by pyplot, which keeps all figures
    return out.getvalue()


def _tables(study: optuna.Study) -> list[Section]:
    finished = finished_trials(study)
    flags = list(dict.fromkeys(n for t in finished for n in t.user_attrs["values"]))
    best = [
        (
            name_of(trial.number),
            *(f"{value:.5g}" for value in trial.values),
            *(str(trial.user_attrs["values"].get(name, "")) for name in flags),
        )
        for trial in finished[:MAX_ROWS]
    ]
    failed = [
        (name_of(trial.number), str(trial.user_attrs.get("error", "")))
        for trial in study.get_trials(False, (TrialState.FAIL,))[:MAX_ROWS]
    ]
    head = ("", *(study.metric_names or ["value"]), *flags)
    return [
        Section(title="Best trials", rows=best, head=head, num_bold=1, is_open=True),
        Section(title="Trials that failed", rows=failed),
    ]
