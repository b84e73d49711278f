"""The page of a sweep: its best trials, and Optuna's plots."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any

import matplotlib as mpl
import optuna
from matplotlib import pyplot as plt
from optuna.importance import PedAnovaImportanceEvaluator
from optuna.trial import TrialState
from optuna.visualization import matplotlib as plots

from mpitrain.record.run_dir import read_result
from mpitrain.tools.report.figures import Chart, style
from mpitrain.tools.report.page import fill
from mpitrain.tools.report.summary import Section
from mpitrain.tools.sweep.study import load_study

MAX_ROWS = 30


def sweep_page(path: Path) -> tuple[str, list[Chart]]:
    """Return the page of a sweep folder, and its charts."""
    study, result = load_study(path), read_result(path)
    name, status = path.absolute().name, str(result.get("status"))
    metrics = study.metric_names or ["value"]
    with style():
        charts = _charts(study, metrics)
        kind = status if status in ("finished", "failed") else "running"
        said = str(result.get("error") or result.get("stopped") or "")
        text = fill(
            title=escape(name),
            head=f'<h1>{escape(name)} <span class="status {kind}">{status}</span></h1>',
            status=escape(str(result.get("summary") or "")),
            errors=f'<div class="error">{escape(said)}</div>' if said else "",
            tiles="",
            charts=charts,
            sections=[_best(study, metrics), _failed(study)],
        )
    return text, charts


def _charts(study: optuna.Study, names: Sequence[str]) -> list[Chart]:
    """Draw what can be drawn of the trials that are finished."""
    target: dict[str, Any] = {"target_name": names[0]}
    if len(names) > 1:
        target["target"] = lambda trial: trial.values[0]
    charts = []

    def draw(name: str, title: str, plot: Callable[..., Any], **options: Any) -> None:
        chart = Chart(name=name, title=title, is_wide=name == "parallel")
        with mpl.rc_context({"text.parse_math": True}):  # powers of ten
            chart.take(plot(study, **options))
            chart.figure.draw_without_rendering()
        charts.append(chart)

    finished = study.get_trials(False, (TrialState.COMPLETE,))
    if finished:
        draw(
            "history",
            "Trials in their order",
            plots.plot_optimization_history,
            **target,
        )
        draw("parallel", "Flags and result", plots.plot_parallel_coordinate, **target)
    if len(names) in (2, 3) and finished:
        draw("pareto", "Pareto front", plots.plot_pareto_front, target_names=names)
    if len({tuple(trial.values) for trial in finished}) > 1:
        target["evaluator"] = PedAnovaImportanceEvaluator()
        title = "Importance of the flags (PED-ANOVA)"
        draw("importance", title, plots.plot_param_importances, **target)
    plt.close("all")
    return charts


def _best(study: optuna.Study, metrics: Sequence[str]) -> Section:
    sign = 1 if study.directions[0].name == "MINIMIZE" else -1
    finished = study.get_trials(False, (TrialState.COMPLETE,))
    finished.sort(key=lambda trial: sign * trial.values[0])
    names = list(dict.fromkeys(n for t in finished for n in t.user_attrs["values"]))
    rows = [
        (
            f"trial-{trial.number:04}",
            *(f"{value:.5g}" for value in trial.values),
            *(str(trial.user_attrs["values"].get(name, "")) for name in names),
        )
        for trial in finished[:MAX_ROWS]
    ]
    head = ("", *metrics, *names)
    return Section(title="Best trials", rows=rows, head=head, num_bold=1, is_open=True)


def _failed(study: optuna.Study) -> Section:
    rows = [
        (f"trial-{trial.number:04}", str(trial.user_attrs.get("error", "")))
        for trial in study.get_trials(False, (TrialState.FAIL,))[:MAX_ROWS]
    ]
    return Section(title="Trials that failed", rows=rows)
