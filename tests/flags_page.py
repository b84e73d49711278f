"""Write `docs/reference/flags.md` from the configuration: `make flags`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mpitrain import TrainConfig
from mpitrain.launch.run_target import RunConfig
from mpitrain.settings import Flag, flags_of
from mpitrain.stage.stage import StageConfig
from mpitrain.tools.check import CheckConfig
from mpitrain.tools.diff import DiffConfig
from mpitrain.tools.export import ExportConfig
from mpitrain.tools.fetch import FetchConfig
from mpitrain.tools.jobs.hostfile import HostfileConfig
from mpitrain.tools.jobs.jobscript import JobscriptConfig
from mpitrain.tools.jobs.supervisor import SuperviseConfig
from mpitrain.tools.new.new import NewConfig
from mpitrain.tools.replay.config import ReplayConfig
from mpitrain.tools.report.report import ReportConfig
from mpitrain.tools.sweep.config import SweepConfig
from mpitrain.tools.watch import WatchConfig
from mpitrain.warm.fork_server import ServeConfig

PAGE = Path(__file__).parents[1] / "docs/reference/flags.md"

COMMANDS: dict[str, Any] = {
    "Training": TrainConfig,
    "run": RunConfig,
    "stage": StageConfig,
    "sweep": SweepConfig,
    "check": CheckConfig,
    "jobscript": JobscriptConfig,
    "hostfile": HostfileConfig,
    "serve": ServeConfig,
    "supervise": SuperviseConfig,
    "watch": WatchConfig,
    "report": ReportConfig,
    "diff": DiffConfig,
    "replay": ReplayConfig,
    "export": ExportConfig,
    "fetch": FetchConfig,
    "new": NewConfig,
}

HEAD = """# Flags

`make flags` writes this page from the configuration. `--config FILE.yaml` reads the
flags of a training, or of `run`, from a file with the same names; flags on the command
line take precedence. `--no-random-flip` undoes `--random-flip`, and so on. `--help`
shows the common flags of a training, `--help-all` all of them. `--version` shows the
version, and `sweep --best NAME` the command of the best trial.
"""


def row_of(flag: Flag) -> str:
    """Return the row of a table."""
    named = " ".join(filter(None, [flag.name, flag.values]))
    default = flag.default
    if isinstance(default, tuple):
        default = " ".join(map(str, default))
    if default is True:
        default = "on"
    has_default = default != "" and not isinstance(default, bool)
    has_default &= isinstance(default, str | int | float | Path)
    told = f"`{default}`" if has_default else ""
    return f"| `{named}` | {told} | {flag.text} |".replace("INT|auto", "INT or auto")


def page() -> str:
    """Return the page."""
    lines = [HEAD]
    for command, kind in COMMANDS.items():
        lines.append(f"## {command}\n")
        flags = list(flags_of(kind))
        groups = list(dict.fromkeys(flag.group for flag in flags))
        for group in groups:
            if len(groups) > 1:
                title = (group.__doc__ or "").partition("\n")[0].rstrip(".")
                lines.append(f"### {'Other' if group is kind else title}\n")
            lines.append("| flag | default | |\n|---|---|---|")
            lines += [row_of(flag) for flag in flags if flag.group is group]
            lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page())
