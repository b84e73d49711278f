"""Fetching: whole files or none, from a real server on loopback."""

from __future__ import annotations

import contextlib
import functools
import gzip
import hashlib
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import fashion_mnist
import pytest

from mpitrain.cli import main
from mpitrain.data import fetching, idx
from mpitrain.errors import DataError, UsageError

RAW = Path("FashionMNIST", "raw")
FILES = [f"{name}.gz" for name in fashion_mnist.FILES]


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Fashion-MNIST as its authors published it."""
    return fashion_mnist.published(tmp_path_factory.mktemp("published"))


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1,localhost")


class Server(SimpleHTTPRequestHandler):
    """Serves a folder, well or badly."""

    asked: list[str]
    """What was downloaded, in order."""
    cut_after: int | None = None
    """Bytes after which a connection breaks; others wait there until `released`."""
    released: threading.Event

    def do_GET(self) -> None:
        if not self.headers.get("Method"):  # torchvision's way to ask for the head
            self.asked.append(self.path.rpartition("/")[2])
        super().do_GET()

    def copyfile(self, source: Any, outputfile: Any) -> None:
        if self.cut_after is None or self.headers.get("Method"):
            super().copyfile(source, outputfile)
            return
        outputfile.write(source.read(self.cut_after))
        outputfile.flush()
        self.released.wait(60)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


@contextlib.contextmanager
def serving(folder: Path, **settings: Any) -> Iterator[tuple[str, type[Server]]]:
    """Serve a folder on loopback; give its address and what was asked for."""
    fresh = {"asked": [], "released": threading.Event()}
    kind = type("Server", (Server,), fresh | settings)
    handler = functools.partial(kind, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.handle_error = lambda *_: None  # whoever hangs up early
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", kind
        finally:
            kind.released.set()
            server.shutdown()
            thread.join()


def there(data_dir: Path) -> list[str]:
    """All files below a folder."""
    found = [p for p in data_dir.rglob("*") if p.is_file()]
    return sorted(str(p.relative_to(data_dir)) for p in found)


WHOLE = sorted(f"{RAW}/{name}" for file in FILES for name in (file, file[:-3]))


@pytest.mark.parametrize("slash", ["", "/"])
def test_a_set_is_fetched_from_a_server_into_torchvisions_layout(
    published: Path, tmp_path: Path, slash: str, capfd: pytest.CaptureFixture[str]
) -> None:
    from torchvision.datasets import FashionMNIST

    assert len(fetching.missing("fashion-mnist", tmp_path)) == 4
    with serving(published) as (address, server):
        fetching.fetch("fashion-mnist", tmp_path, address + slash)
        assert server.asked == FILES
        assert there(tmp_path) == WHOLE
        assert fetching.missing("fashion-mnist", tmp_path) == []
        fetching.fetch("fashion-mnist", tmp_path, address)  # whole: nothing to do
        assert server.asked == FILES
    assert capfd.readouterr() == ("", "")
    assert len(FashionMNIST(tmp_path, train=False)) == 10000
    assert len(idx.read("fashion-mnist", tmp_path).arrays["train_labels"]) == 60000


def test_files_that_are_whole_stay_and_others_are_replaced(
    published: Path, tmp_path: Path
) -> None:
    fetching.fetch("fashion-mnist", tmp_path, published.as_uri())
    raw = tmp_path / RAW
    labels, images = "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte"
    (raw / labels).write_bytes((raw / labels).read_bytes()[:-1])  # its .gz is whole
    (raw / images).write_bytes(b"")
    (raw / f"{images}.gz").write_bytes(b"")
    with serving(published) as (address, server):
        fetching.fetch("fashion-mnist", tmp_path, address)
        assert server.asked == [f"{images}.gz"]
    assert there(tmp_path) == WHOLE
    idx.read("fashion-mnist", tmp_path)


def test_a_file_that_is_not_the_published_one_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mirror").mkdir()
    for file in FILES:
        (tmp_path / "mirror" / file).write_bytes(gzip.compress(b"generated"))
    with (
        serving(tmp_path / "mirror") as (address, _),
        pytest.raises(DataError, match=r"md5 .*, expected 8d4fb7e6") as caught,
    ):
        fetching.fetch("fashion-mnist", tmp_path / "data", address)
    assert f"{address}/train-images-idx3-ubyte.gz: " in str(caught.value)
    assert there(tmp_path / "data") == []


def test_a_web_page_in_the_place_of_a_file_is_told(tmp_path: Path) -> None:
    (tmp_path / FILES[0]).write_bytes(b"<html>log in first</html>")
    with pytest.raises(DataError, match=r"begins with b'<html>log in .* web page"):
        fetching.fetch("mnist", tmp_path / "data", tmp_path.as_uri())


def test_a_connection_that_breaks_leaves_nothing(
    published: Path, tmp_path: Path
) -> None:
    released = threading.Event()
    released.set()
    with (
        serving(published, cut_after=2000, released=released) as (address, _),
        pytest.raises(DataError, match="2000 bytes"),
    ):
        fetching.fetch("fashion-mnist", tmp_path, address)
    assert there(tmp_path) == []


def test_a_server_that_falls_silent_is_given_up(
    published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetching, "TIMEOUT_SECONDS", 0.5)
    with (
        serving(published, cut_after=2000) as (address, _),
        pytest.raises(DataError, match="timed out"),
    ):
        fetching.fetch("fashion-mnist", tmp_path, address)
    assert there(tmp_path) == []


@pytest.mark.parametrize(
    ("sent", "status", "left"), [(signal.SIGKILL, -9, 1), (signal.SIGINT, 130, 0)]
)
def test_a_fetch_that_is_killed_leaves_nothing_that_is_read(
    published: Path, tmp_path: Path, sent: signal.Signals, status: int, left: int
) -> None:
    words = ["fetch", "fashion-mnist", "--data-dir", str(tmp_path), "--mirror"]
    with serving(published, cut_after=2000) as (address, _):
        command = [sys.executable, "-m", "mpitrain", *words, address]
        # A shell's `&` makes all that it starts deaf to INT; a child inherits that.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        fetch = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        signal.signal(signal.SIGINT, before)
        try:
            until = time.monotonic() + 120
            while not there(tmp_path) and time.monotonic() < until:
                assert fetch.poll() is None, fetch.stderr.read()
                time.sleep(0.1)
        finally:
            fetch.send_signal(sent)
            fetch.communicate(timeout=60)
    assert fetch.returncode == status
    assert len(there(tmp_path)) == left  # the part that came, in a folder of its own
    assert len(fetching.missing("fashion-mnist", tmp_path)) == 4
    with pytest.raises(DataError, match="is not in"):
        idx.read("fashion-mnist", tmp_path)
    fetching.fetch("fashion-mnist", tmp_path, published.as_uri())
    assert there(tmp_path)[left:] == WHOLE


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist", "cifar10", "cifar100"])
def test_without_a_network_the_error_says_what_to_do(tmp_path: Path, name: str) -> None:
    with serving(tmp_path) as (address, _):
        pass  # nobody listens there any more
    with pytest.raises(DataError, match="Connection refused") as caught:
        fetching.fetch(name, tmp_path, address)
    text = str(caught.value)
    assert f"{address}/" in text
    assert f"python -m mpitrain fetch {name} --data-dir {tmp_path}" in text
    assert "login node" in text
    assert "--mirror" in text
    assert there(tmp_path) == []


def test_a_server_without_the_file_is_told(tmp_path: Path) -> None:
    with (
        serving(tmp_path) as (address, _),
        pytest.raises(DataError, match="404"),
    ):
        fetching.fetch("mnist", tmp_path / "data", address)


@pytest.mark.parametrize("mirror", ["/some/folder", "host.org/files", "ftp://a/b", ""])
def test_a_mirror_that_is_no_address_is_refused(tmp_path: Path, mirror: str) -> None:
    with pytest.raises(UsageError, match=r"--mirror .*expected .*file:///"):
        fetching.fetch("mnist", tmp_path, mirror)


def test_a_data_dir_that_cannot_be_written_is_told(
    published: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"file.*: cannot be written: .*--data-dir"):
        fetching.fetch("fashion-mnist", tmp_path / "file", published.as_uri())


def test_cifar_is_fetched_and_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from test_cifar import archive, made, write
    from torchvision.datasets import CIFAR100

    write(tmp_path / "cifar-100-python", made("cifar100"))
    packed = archive("cifar100", tmp_path)
    (tmp_path / "mirror").mkdir()
    shutil.move(packed, tmp_path / "mirror")
    packed = tmp_path / "mirror" / packed.name
    # The real ones are too large to carry: the sum of ours in the place of theirs.
    md5 = hashlib.md5(packed.read_bytes()).hexdigest()
    monkeypatch.setattr(CIFAR100, "tgz_md5", md5)
    data = tmp_path / "data"
    with serving(packed.parent) as (address, server):
        fetching.fetch("cifar100", data, address)
        (data / "cifar-100-python" / "train").write_bytes(b"broken")
        fetching.fetch("cifar100", data, address)  # again from the archive
        assert server.asked == [packed.name]
    files = ["meta", "test", "train"]
    unpacked = [f"cifar-100-python/{file}" for file in files]
    assert there(data) == [packed.name, *unpacked]
    with tarfile.open(packed) as tar:
        for file in files:
            member = tar.extractfile(f"cifar-100-python/{file}")
            assert member is not None
            assert (data / "cifar-100-python" / file).read_bytes() == member.read()


def test_the_command_prints_one_line_per_set(
    published: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["fetch", "fashion-mnist", "--data-dir", str(tmp_path)]
    assert main([*words, "--mirror", published.as_uri()]) == 0
    line = (
        f"fashion-mnist: {tmp_path / RAW}, 60000 samples to train and 10000 to "
        "validate, 10 classes\n"
    )
    assert capsys.readouterr().out == line
    assert main([*words, "--mirror", "http://127.0.0.1:1"]) == 0  # nothing to fetch
    assert capsys.readouterr().out == line


@pytest.mark.parametrize(
    ("words", "status", "text"),
    [
        ([], 2, "which?"),
        (["mnist2"], 2, "'mnist2' is not known"),
        (["mnist", "imagenet"], 2, "'imagenet' is not known"),
        (["mnist", "--mirror", "nowhere"], 2, "--mirror 'nowhere'"),
        (["mnist", "cifar10", "--mirror", "http://127.0.0.1:1"], 1, "refused"),
    ],
)
def test_the_command_says_what_is_wrong(
    words: list[str],
    status: int,
    text: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["fetch", *words, "--data-dir", str(tmp_path)]) == status
    assert text in capsys.readouterr().err


def test_what_is_missing_is_told_without_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from mpitrain.data import fetching\n"
        f"fetching.missing('mnist', Path({str(tmp_path)!r}))\n"
        "assert not {'torch', 'torchvision', 'mpi4py.MPI'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
