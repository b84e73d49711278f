"""The process in which wandb works; started by `weights_and_biases`, not imported.

It reads pickled messages, to their end: also that of a rank that was killed. It never
asks for a key: it has no terminal. Where wandb cannot reach its server, or has no key,
it goes offline.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import ssl
import sys
import threading
import time
import traceback
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

PROBE_SECONDS = 3.0
"""How long the server may take to answer anything at all."""

INIT_SECONDS = 8
"""How long it may take to begin a run."""

SEND_SECONDS = 10
"""How long the end waits for all to be sent."""

GONE_SECONDS = 5.0
"""How long all may take to end when the rank is gone."""


def main() -> None:
    """Do what the rank says, until it says no more."""
    rank_pid = os.getppid()
    messages = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    # What wandb's own process holds must not keep the rank's pipes open.
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(2, 1)

    def answer(**said: str) -> None:
        with contextlib.suppress(OSError):
            answers.write(json.dumps(said) + "\n")

    threading.Thread(target=_follow, args=(rank_pid,), daemon=True).start()
    try:
        _obey(messages, answer)
    except Exception as error:
        answer(error=f"{type(error).__name__}: {error}")
        raise


def _obey(messages: Any, answer: Any) -> None:
    import wandb

    _, asked = pickle.load(messages)
    run, why_offline = _begin(wandb, asked)
    sync_dir = _shown(run.settings.sync_dir)
    if run.settings._offline:  # noqa: SLF001 - a property, without another name
        answer(say=f"offline, {why_offline}; `wandb sync {sync_dir}` sends it later")
    elif run.url:
        answer(say=run.url)
    answer(sync_dir=sync_dir)
    # A run that goes on may tell of a step again, and wandb's own count only rises.
    run.define_metric("step")
    run.define_metric("*", step_metric="step")
    exit_code = 1  # if nobody says otherwise
    with contextlib.suppress(EOFError, pickle.UnpicklingError):
        while True:
            kind, *what = pickle.load(messages)
            if kind == "finish":
                exit_code, summary = what
                run.summary.update(summary)
                break
            if kind == "images":
                step, name, images = what
                shown = [wandb.Image(_squeezed(image)) for image in images]
                run.log({"step": step, name: shown})
            else:
                step, values = what
                run.log({"step": step, **values})
    if exit_code == 75:  # it goes on
        run.mark_preempting()
    run.finish(exit_code=exit_code)
    wandb.teardown()


def _begin(wandb: Any, asked: dict[str, Any]) -> tuple[Any, str]:
    """Begin the run, offline where it must be; return it, and why."""
    settings = _settings(wandb, asked["rank_pid"])
    mode = wandb.setup().settings.mode
    why = f"as WANDB_MODE says ({mode})"
    given = {
        "project": asked["project"] or os.environ.get("WANDB_PROJECT") or "mpitrain",
        "dir": asked["dir"],
        "id": asked["id"],
        "name": asked["name"],
        "group": asked["group"],
        "tags": asked["tags"],
        "config": asked["config"],
        "resume": "allow",
        "settings": settings,
    }
    if mode not in ("online", "run"):
        return wandb.init(**given), why
    url = wandb.setup().settings.base_url
    why = _why_unreachable(url)
    if not why:
        try:
            return wandb.init(**given), ""
        except Exception as error:
            traceback.print_exception(error)  # the whole of it, into the log
            why = (str(error) or type(error).__name__).splitlines()[0].rstrip(".")
            wandb.teardown()  # its service still holds the run's id for its own
    return wandb.init(**given, mode="offline"), why


def _settings(wandb: Any, rank_pid: int) -> Any:
    """Return wandb's settings: quiet, and no eyes on console, code and git."""
    wanted = {
        "quiet": True,
        "silent": True,
        "console": "off",
        "disable_git": True,
        "disable_code": True,
        "save_code": False,
        "symlink": False,  # ranks would write over each other's
        "init_timeout": INIT_SECONDS,
        "finish_timeout": SEND_SECONDS,
        "stop_fn": _refuse_to_stop,
        "x_stats_pid": rank_pid,  # whose memory and GPU it looks at
        "x_save_requirements": False,
        "x_transaction_log_flush_interval": 1.0,
    }
    known = getattr(wandb.Settings, "model_fields", wanted)  # others in other versions
    return wandb.Settings(**{k: v for k, v in wanted.items() if k in known})


def _refuse_to_stop() -> None:
    """Let the button in the browser end no training; a file `stop` does, in time."""


def _why_unreachable(url: str) -> str:
    """Ask the server for anything, through a proxy if there is one.

    A socket that connects is not enough: there may be nobody behind it.

    Returns:
        Why it does not answer, or nothing.
    """
    found = [f"{url} does not answer"]

    def ask() -> None:
        try:
            urllib.request.urlopen(url, timeout=PROBE_SECONDS).close()
            found[0] = ""
        except urllib.error.HTTPError:
            found[0] = ""  # an answer, too
        except urllib.error.URLError as error:
            # With a certificate that Python does not know wandb may be content.
            is_there = isinstance(error.reason, ssl.SSLError)
            found[0] = "" if is_there else f"{url} cannot be reached: {error.reason}"
        except (OSError, ValueError) as error:
            found[0] = f"{url} cannot be reached: {error}"

    # In a thread: who asks for a name may wait for very long.
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(PROBE_SECONDS)
    return found[0]


def _follow(rank_pid: int) -> None:
    """End this process soon after the rank, whatever it hangs in."""
    while os.getppid() == rank_pid:
        time.sleep(0.5)
    time.sleep(GONE_SECONDS)
    os._exit(1)


def _squeezed(image: Any) -> Any:
    """Return grey images `(H, W)`, as wandb wants them."""
    return image[..., 0] if image.shape[-1] == 1 else image


def _shown(path: str) -> str:
    here = Path.cwd()
    found = Path(path)
    return str(found.relative_to(here) if found.is_relative_to(here) else found)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # wandb's threads have nothing more to do
