"""A trial of a user's script: it runs as ``__main__`` in a process of the sweep.

Its `mpitrain.init` returns the ranks of the trial, its `Trainer` has the `Reporter`,
its `Checkpointer` the sweep's `PreemptionHandler`.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence

from mpitrain.checkpoint.preemption import PreemptionHandler
from mpitrain.errors import Stopped, UsageError
from mpitrain.files import write_json
from mpitrain.launch.init import torchrun_variables
from mpitrain.launch.job import Job
from mpitrain.launch.run_script import execute, load
from mpitrain.launch.run_target import split
from mpitrain.mpi.collectives import on_rank_zero, world_comm
from mpitrain.mpi.world import World
from mpitrain.record.result import update_result
from mpitrain.record.run_dir import read_result
from mpitrain.record.runs import is_finished, open_run
from mpitrain.tools.sweep.config import PreparedSweep
from mpitrain.tools.sweep.reporter import Reporter
from mpitrain.tools.train.prepare import PreparedRun, check_stop_file
from mpitrain.train.progress import finished_line


def prepare_trial(sweep: PreparedSweep, name: str) -> PreparedRun:
    """Make the run folder of a trial, or open the existing one; on rank zero."""
    folder = open_run(sweep.run_dir, name, exists="resume")
    result = is_finished(folder.path)
    done, status = check_stop_file(folder.path, finished_line(result) if result else "")
    return PreparedRun(
        config=sweep.config, folder=folder, done=done, status=status, limit_seconds=None
    )


def run_trial(
    job: Job,
    world: World,
    run: PreparedRun,
    reporter: Reporter,
    handler: PreemptionHandler,
    words: Sequence[str],
) -> int:
    """Run the script that ``words`` name; return 0, or 75 if it was stopped.

    Collective over the ranks of ``world``, the trial's.

    Raises:
        UsageError: No `Trainer` has trained, or none has validated; on every rank.
    """
    target = split(words)[1]
    assert target is not None  # `prepare` has checked it
    with job.part(world, world_comm()) as part, _as_after_the_start(world):
        part.pending, part.preemption_handler = run.config.launch, handler
        part.replace_callbacks = reporter.add_to
        _, found = load(part, target, lambda: None)
        part.watchdog.expect_steps("in the script")
        try:
            execute(found)
        except (Stopped, SystemExit) as left:
            if isinstance(left, SystemExit) and left.code == 2:
                reason = "ended with status 2, as argparse ends for wrong arguments"
                raise UsageError(f"{target.name} {reason}") from None
            if not reporter.stopped:
                raise

    def finish() -> None:
        found = read_result(run.run_dir)
        if reporter.stopped:
            stopped = found.get("stopped", reporter.stopped)
            update_result(run.run_dir, status="stopped", stopped=stopped)
            return
        # What the script has recorded counts, such as the metrics of the best weights.
        values = {f"val_{name}": it for name, it in reporter.values.items()} | found
        values = {k: it for k, it in values.items() if k != "stopped"}
        if not (reporter.is_used and any(name.startswith("val_") for name in values)):
            what = "validation of" if reporter.is_used else "training by"
            raise UsageError(
                f"{target.name} has ended without a {what} an mpitrain.Trainer; "
                "expected one fit with val_data. A sweep sees no loop of your own"
            )
        write_json(run.run_dir / "result.json", {**values, "status": "finished"})

    on_rank_zero(world_comm(), finish, "record the trial")
    return Stopped.exit_status if reporter.stopped else 0


@contextlib.contextmanager
def _as_after_the_start(world: World) -> Iterator[None]:
    """Undo what a script changes in its process: the next one finds it as after `run`.

    But for the modules that it imports.
    """
    # `execute` sets both, the second for pickles of spawned processes.
    names, folder = ("__main__", "__mp_main__"), os.getcwd()
    modules = {name: sys.modules[name] for name in names if name in sys.modules}
    argv, path, variables = sys.argv[:], sys.path[:], dict(os.environ)
    os.environ.update(torchrun_variables(world))
    try:
        yield
    finally:
        sys.argv[:], sys.path[:] = argv, path
        for name in names:
            sys.modules.pop(name, None)
        sys.modules.update(modules)
        for name in os.environ.keys() - variables.keys():
            del os.environ[name]
        os.environ.update(variables)
        os.chdir(folder)
