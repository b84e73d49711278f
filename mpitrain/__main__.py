"""``python -m mpitrain``: see `mpitrain.cli`."""

import os
import sys


def current_folder() -> str:
    """Return the current folder, without which no command can start."""
    try:
        return os.getcwd()
    except OSError as error:
        from mpitrain.launch.env_checks import launched_label

        sys.exit(
            f"[{launched_label(os.environ)}] the current folder cannot be used: "
            f"{error.strerror}. It was removed or is out of reach; cd to another one"
        )


def console() -> None:
    """Run the command line, in a fork of a fork server if there is one."""
    from mpitrain.warm.proxy import start_warm

    current_folder()
    start_warm()
    from mpitrain import cli

    cli.console()


if __name__ == "__main__":
    if not sys.flags.safe_path and sys.path[0] in ("", current_folder()):
        # `python -m` looks into the current folder first: numpy and torch would take a
        # numbers.py or queue.py there for Python's own. The console script begins here;
        # plugins and `run` put the user's folder first when all that is imported.
        sys.path[0] = os.path.dirname(sys.executable)  # noqa: PTH120
        root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH100, PTH120
        if root not in sys.path:
            sys.path.append(root)  # a clone that is not installed: for its processes

    console()
