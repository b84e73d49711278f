"""`python -m mpitrain chain`: what follows the end of a job's mpirun."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpitrain.cli import main

FLAGS = ("--", "--name", "mine", "--runs-dir")


class Script:
    """Asks as a job script does."""

    def __init__(
        self,
        folder: Path,
        patch: pytest.MonkeyPatch,
        capture: pytest.CaptureFixture[str],
    ) -> None:
        self.folder, self.patch, self.capture = folder, patch, capture
        self.said = ""

    def job(self, number: str) -> None:
        self.patch.setenv("SLURM_JOB_ID", number)

    def save(self, step: int) -> None:
        """Let the training have a checkpoint."""
        name = f"step-{step:08}"
        (self.folder / "mine" / "checkpoints" / name).mkdir(parents=True)

    def finish(self) -> None:
        (self.folder / "mine").mkdir(parents=True, exist_ok=True)
        (self.folder / "mine/result.json").write_text('{"status": "finished"}')

    def ask(self, *words: str, more: tuple[str, ...] = ()) -> str:
        status = main(["chain", *words, *FLAGS, str(self.folder), *more])
        printed = self.capture.readouterr()
        self.said = printed.err
        return printed.out.strip() if status == 0 else f"failed with {status}"

    def begin(self, *words: str) -> str:
        return self.ask("begin", *words)

    def next(self, status: int, *words: str) -> str:
        return self.ask("next", "--status", str(status), *words)


@pytest.fixture
def script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Script:
    for name in ("PBS_JOBID", "PATH"):  # no squeue here that could answer
        monkeypatch.delenv(name, raising=False)
    made = Script(tmp_path / "runs", monkeypatch, capsys)
    made.job("7")
    return made


def test_a_training_that_stopped_goes_on_in_another_job(script: Script) -> None:
    assert script.begin() == ""
    script.save(5)
    assert script.next(75) == "later"
    assert script.begin() == ""  # SLURM's job comes back under its number
    script.finish()
    assert script.next(0) == "end"


def test_a_failure_is_tried_again_in_the_same_job_unless_its_time_is_up(
    script: Script,
) -> None:
    script.begin()
    script.save(5)
    assert script.next(137) == "here"
    assert "ended with status 137 at step 5: once more" in script.said
    script.save(9)
    assert script.next(1, "--out-of-time") == "later"


def test_two_failures_in_a_row_without_progress_end_it(script: Script) -> None:
    script.begin()
    assert script.next(1) == "here"
    assert script.next(76) == "end"
    assert "failed 2 times without progress, at step 0, the last with" in script.said
    script.begin()
    assert script.next(1) == "here"
    script.save(3)
    assert script.next(1) == "here"  # it had come to step 3: counted anew
    assert script.next(1) == "here"
    assert script.next(1) == "end"


def test_a_failure_now_and_then_is_none_in_a_row(script: Script) -> None:
    script.begin()
    assert script.next(1) == "here"
    for step in (10, 20):
        script.save(step)
        assert script.next(75) == "later"
        script.begin()
    assert script.next(1) == "here"


def test_jobs_that_end_without_a_word_are_begun_anew_but_not_for_ever(
    script: Script,
) -> None:
    script.begin()
    script.begin()  # it was evicted, and SLURM has started it again
    script.begin()
    script.save(4)
    for _ in range(4):
        assert script.begin() == ""
    assert script.next(1) == "here"
    script.begin()
    assert script.begin() == "failed with 1"
    assert "5 jobs of mine ended without a word" in script.said


def test_a_stop_without_a_step_is_no_failure(script: Script) -> None:
    for _ in range(4):
        script.begin()
        assert script.next(75) == "later"


def test_a_chain_has_so_many_jobs_and_no_more(script: Script) -> None:
    few = ("--jobs", "2")
    script.begin(*few)
    assert script.next(75, *few) == "later"
    script.begin(*few)
    script.save(8)
    assert script.next(75, *few) == "end"
    assert "has had 2 jobs (--jobs) and is at step 8" in script.said
    assert script.begin(*few) == ""  # submitted again: as many more


def test_a_job_that_is_preempted_for_the_last_time_does_not_begin(
    script: Script,
) -> None:
    script.begin("--jobs", "1")
    script.save(2)
    assert script.begin("--jobs", "1") == "failed with 1"
    assert "has had 1 job (--jobs)" in script.said


def test_a_file_named_stop_ends_it(script: Script) -> None:
    script.begin()
    script.save(2)
    (script.folder / "mine" / "stop").touch()
    assert script.next(75) == "end"
    assert "stop ended it: submit again, to go on" in script.said


def test_a_mistake_in_the_flags_is_not_tried_again(script: Script) -> None:
    script.begin()
    assert script.next(2) == "end"


def test_what_looks_like_a_mistake_after_a_checkpoint_is_a_failure(
    script: Script,
) -> None:
    """The run's lock is held by a rank that does not die; a folder is not mounted."""
    script.begin()
    script.save(2)
    assert script.next(2) == "here"


def test_an_end_with_0_of_a_training_that_is_not_finished_is_a_failure(
    script: Script,
) -> None:
    script.begin()
    assert script.next(0) == "here"


def test_another_job_is_refused_where_nobody_knows_whether_the_first_lives(
    script: Script,
) -> None:
    script.begin()
    script.job("8")
    assert script.begin() == "failed with 2"
    assert "job 7 has the training mine already, and may wait or run" in script.said
    assert script.next(75) == "failed with 2"


def test_the_job_that_was_submitted_for_it_has_the_training(script: Script) -> None:
    script.begin("--jobs", "2")
    assert script.next(75, "--jobs", "2") == "later"
    assert script.ask("handed", "--to", "8") == ""
    assert script.begin("--jobs", "2") == "failed with 2"  # the first one, once more
    assert "job 8 has the training mine already" in script.said
    script.job("8")
    assert script.begin("--jobs", "2") == ""
    assert script.next(75, "--jobs", "2") == "end"
    assert "has had 2 jobs" in script.said


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--new-run",), "--new-run has no place in a chain"),
        (("--resume", "never"), "--resume never has no place in a chain"),
        (("--dry-run",), "--dry-run has no place in a chain"),
    ],
)
def test_flags_that_begin_anew_are_refused(
    script: Script, more: tuple[str, ...], words: str
) -> None:
    assert script.ask("begin", more=more) == "failed with 2"
    assert words in script.said


def test_a_resume_from_its_own_past_is_refused(script: Script) -> None:
    script.save(3)
    past = script.folder / "mine" / "checkpoints" / "step-00000003"
    assert script.ask("begin", more=("--resume", str(past))) == "failed with 2"
    assert "each would begin there anew" in script.said


def test_without_a_name_there_is_no_chain(script: Script) -> None:
    assert main(["chain", "begin", "--", "--epochs", "3"]) == 2


def test_outside_a_job_there_is_no_chain(script: Script) -> None:
    script.patch.delenv("SLURM_JOB_ID")
    assert script.begin() == "failed with 2"
    assert "neither SLURM_JOB_ID nor PBS_JOBID is set" in script.said


@pytest.mark.parametrize("words", [("begin", "--status", "1"), ("next",)])
def test_the_status_belongs_to_next(script: Script, words: tuple[str, ...]) -> None:
    assert script.ask(*words) == "failed with 2"
    assert "chain next wants --status" in script.said


def test_what_a_full_disk_left_of_the_memory_is_no_chain(script: Script) -> None:
    script.begin()
    (script.folder / ".mine.chain").write_text('{"job_id": "7", "num_')
    assert script.begin() == ""
    assert script.next(75) == "later"
