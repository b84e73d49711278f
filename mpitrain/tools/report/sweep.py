"""The page of a sweep: its best trials, and Optuna's plots."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
from mpitrain.tools.sweep.config import OUTCOMES
from mpitrain.tools.sweep.study import counts_of, load_study, metrics_of

MAX_ROWS = 30


def sweep_page(path: Path) -> tuple[str, list[Chart]]:
    """Return the page of a sweep folder, and its charts."""
    study, result = load_study(path), read_result(path)
    name, status = path.absolute().name, str(result.get("status"))
    counts = counts_of(study)
    with style():
        charts = _charts(study)
        tiles = "".join(
            f'<div class="tile"><b>{counts[it]}</b><span>trials {it}</span></div>'
            for it in OUTCOMES
        )
        kind = status if status in ("finished", "failed") else "running"
        said = str(result.get("error") or result.get("stopped") or "")
        text = fill(
            title=escape(name),
            head=f'<h1>{escape(name)} <span class="status {kind}">{status}</span></h1>',
            status=escape(str(result.get("summary") or "")),
            errors=f'<div class="error">{escape(said)}</div>' if said else "",
            tiles=f'<div class="tiles">{tiles}</div>',
            charts=charts,
            sections=[_best(study), _failed(study)],
        )
    return text, charts


def _charts(study: optuna.Study) -> list[Chart]:
    """Draw what can be drawn of the trials that are finished."""
    target: dict[str, Any] = {"target_name": metrics_of(study)[0]}
    is_single = len(study.directions) == 1
    if not is_single:
        target["target"] = lambda trial: trial.values[0]
    of: Mapping[str, tuple[str, Callable[[], Any]]] = {
        "history": (
            "Trials in their order",
            lambda: plots.plot_optimization_history(study, **target),
        ),
        "pareto": (
            "Pareto front",
            lambda: plots.plot_pareto_front(study, target_names=metrics_of(study)),
        ),
        "parallel": (
            "Parameters and result",
            lambda: plots.plot_parallel_coordinate(study, **target),
        ),
        "importance": (
            "Importance of the parameters (PED-ANOVA)",
            lambda: plots.plot_param_importances(
                study, evaluator=PedAnovaImportanceEvaluator(), **target
            ),
        ),
    }
    finished = study.get_trials(False, (TrialState.COMPLETE,))
    charts = []
    for name, (title, draw) in of.items():
        varies = len({tuple(t.values) for t in finished}) > 1
        if (name == "pareto" and is_single) or (name == "importance" and not varies):
            continue
        chart = Chart(name=name, title=title, is_wide=name == "parallel")
        if finished:
            with mpl.rc_context({"text.parse_math": True}):  # powers of ten
                chart.take(draw())
                chart.figure.draw_without_rendering()
        else:
            chart.findings.append("No trial is finished.")
        charts.append(chart)
    plt.close("all")
    return charts


def _best(study: optuna.Study) -> Section:
    sign = 1 if study.directions[0].name == "MINIMIZE" else -1
    finished = study.get_trials(False, (TrialState.COMPLETE,))
    finished.sort(key=lambda trial: sign * trial.values[0])
    names = list(dict.fromkeys(n for t in finished for n in t.user_attrs["values"]))
    rows = [
        (
            f"trial-{trial.number:04}",
            *(f"{value:.5g}" for value in trial.values),
            *(_shown(trial.user_attrs["values"].get(name)) for name in names),
        )
        for trial in finished[:MAX_ROWS]
    ]
    head = ("", *metrics_of(study), *names)
    return Section(title="Best trials", rows=rows, head=head, num_bold=1, is_open=True)


def _failed(study: optuna.Study) -> Section:
    failed = study.get_trials(False, (TrialState.FAIL,))
    rows = [
        (f"trial-{trial.number:04}", str(trial.user_attrs.get("error", "")))
        for trial in failed[:MAX_ROWS]
    ]
    return Section(title="Trials that failed", rows=rows)


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
