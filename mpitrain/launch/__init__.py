"""From `mpirun` to a ready process group; useful without our trainer.

    import mpitrain

    with mpitrain.init() as world:
        model = DistributedDataParallel(model.to(world.device))
        ...

`stages` holds the steps of the start in order, `exit_guard` ends all ranks when one
fails, and `run_script` runs a user's own program.
"""

from mpitrain.launch.config import LaunchConfig
from mpitrain.launch.exit_guard import ExitGuard, abort_on_error
from mpitrain.launch.job import Job, init

__all__ = ["ExitGuard", "Job", "LaunchConfig", "abort_on_error", "init"]
