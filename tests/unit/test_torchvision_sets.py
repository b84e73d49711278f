"""MNIST and CIFAR: found in each layout, refused when broken, fetched whole or not."""

from __future__ import annotations

import contextlib
import functools
import gzip
import hashlib
import pickle
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import fashion_mnist
import numpy as np
import pytest
from data_files import write_cifar10, write_cifar100, write_mnist

from mpitrain.cli import main
from mpitrain.errors import DataError, UsageError
from mpitrain.tasks.image_classification.datasets import torchvision_sets
from mpitrain.tasks.image_classification.datasets.torchvision_sets import (
    fetch,
    find,
    read,
)

IMAGES, LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"
INNER = {"cifar10": "cifar-10-batches-py", "cifar100": "cifar-100-python"}
RAW = Path("FashionMNIST", "raw")
FILES = [f"{name}.gz" for name in fashion_mnist.FILES]
WHOLE = sorted(f"{RAW}/{name}" for file in FILES for name in (file, file[:-3]))


# --- MNIST ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_mnist_is_read_in_torchvisions_layout(tmp_path: Path, name: str) -> None:
    raw = tmp_path / torchvision_sets.CLASSES[name] / "raw"
    write_mnist(raw)
    assert find(name, tmp_path) == raw
    arrays = read(name, tmp_path)
    for part, prefix in (("train", "train"), ("val", "t10k")):
        images = (raw / f"{prefix}-images-idx3-ubyte").read_bytes()[16:]
        labels = (raw / f"{prefix}-labels-idx1-ubyte").read_bytes()[8:]
        assert arrays[f"{part}_inputs"].tobytes() == images
        assert arrays[f"{part}_inputs"].shape == (len(labels), 1, 12, 12)
        assert arrays[f"{part}_labels"].tolist() == [*labels]
        assert arrays[f"{part}_labels"].dtype == np.int64
        assert arrays[f"{part}_inputs"].dtype == np.uint8
    names = bytes(arrays["classes"]).decode().splitlines()
    assert (names == [*"0123456789"]) == (name == "mnist")
    assert len(names) == 10


@pytest.mark.parametrize(
    ("file", "change", "words"),
    [
        (IMAGES, lambda raw: raw[:-3], "torchvision cannot read mnist"),
        (IMAGES, lambda raw: raw + b"ab", "torchvision cannot read mnist"),
        (IMAGES, lambda raw: b"<html>", "torchvision cannot read mnist"),
        (LABELS, lambda raw: raw[:3] + b"\3" + raw[4:], "torchvision cannot read"),
        (LABELS, lambda raw: raw[:8] + b"\12" * 27, "label 10 at sample 0; .* 0 to 9"),
        (
            LABELS,
            lambda raw: raw[:7] + b"\32" + raw[8:-1],
            "found 26 labels, expected 27",
        ),
        (
            "t10k-images-idx3-ubyte",
            lambda raw: raw[:4] + b"\0\0\0\0" + raw[8:16],
            "torchvision cannot read mnist",
        ),
    ],
)
def test_a_broken_file_is_an_error_that_names_its_folder(
    tmp_path: Path, file: str, change: Callable[[bytes], bytes], words: str
) -> None:
    raw = tmp_path / "MNIST/raw"
    write_mnist(raw)
    (raw / file).write_bytes(change((raw / file).read_bytes()))
    with pytest.raises(DataError, match=f"{raw}.*{words}") as caught:
        read("mnist", tmp_path)
    assert f"python -m mpitrain fetch mnist --data-dir {tmp_path}" in str(caught.value)


@pytest.mark.parametrize("name", list(torchvision_sets.CLASSES))
def test_a_set_that_is_not_there_is_told_with_the_command(
    tmp_path: Path, name: str
) -> None:
    folder = tmp_path / "my data"
    assert find(name, folder) is None
    with pytest.raises(DataError, match=f"{name} is not in .*my data") as caught:
        read(name, folder)
    assert f"python -m mpitrain fetch {name} --data-dir '{folder}'" in str(caught.value)


# --- CIFAR ----------------------------------------------------------------------------


def md5(path: Path) -> str:
    return hashlib.md5(path.read_bytes()).hexdigest()


@pytest.fixture(params=["cifar10", "cifar100"])
def cifar(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[str, Path]:
    """A small set, its name and folder; its sums in the place of the published ones."""
    from torchvision import datasets

    name = request.param
    folder = tmp_path / "data" / INNER[name]
    {"cifar10": write_cifar10, "cifar100": write_cifar100}[name](folder)
    kind = getattr(datasets, torchvision_sets.CLASSES[name])
    for files in ("train_list", "test_list"):
        sums = [[file, md5(folder / file)] for file, _ in getattr(kind, files)]
        monkeypatch.setattr(kind, files, sums)
    meta = kind.meta | {"md5": md5(folder / kind.meta["filename"])}
    monkeypatch.setattr(kind, "meta", meta)
    with tarfile.open(tmp_path / kind.filename, "w:gz") as tar:
        tar.add(folder, folder.name)
    monkeypatch.setattr(kind, "tgz_md5", md5(tmp_path / kind.filename))
    return name, folder


def test_cifar_is_read_and_its_archive_extracted(
    cifar: tuple[str, Path], tmp_path: Path
) -> None:
    name, folder = cifar
    arrays = read(name, folder.parent)
    num_train, num_val = {"cifar10": (50, 10), "cifar100": (101, 13)}[name]
    assert arrays["train_inputs"].shape == (num_train, 3, 32, 32)
    assert arrays["val_inputs"].shape == (num_val, 3, 32, 32)
    assert set(arrays["train_labels"]) == set(range(torchvision_sets.NUM_CLASSES[name]))
    first = "data_batch_1" if name == "cifar10" else "train"
    stored = pickle.loads((folder / first).read_bytes(), encoding="latin1")
    assert (arrays["train_inputs"].reshape(num_train, -1)[0] == stored["data"][0]).all()
    fetch(name, tmp_path, "file:///nowhere")  # the archive is there
    again = read(name, tmp_path)
    assert all((again[key] == arrays[key]).all() for key in arrays)


class Attack:
    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("attacked"),)


def test_a_pickle_that_is_not_the_published_one_is_not_loaded(
    cifar: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, folder = cifar
    monkeypatch.chdir(tmp_path)
    for path in folder.iterdir():
        before = path.read_bytes()
        path.write_bytes(pickle.dumps(Attack()))
        with pytest.raises(DataError, match=f"{folder}: .*MD5 is not the published"):
            read(name, folder.parent)
        path.write_bytes(before)
    archive = next(tmp_path.glob("*.tar.gz"))
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(folder, "../elsewhere")
    with pytest.raises(DataError, match="could not be fetched"):
        fetch(name, tmp_path, "file:///nowhere")
    assert not (tmp_path / "attacked").exists()


# --- fetching -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Fashion-MNIST as its authors published it."""
    return fashion_mnist.published(tmp_path_factory.mktemp("published"))


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1,localhost")


class Server(SimpleHTTPRequestHandler):
    """Serves a folder, well or badly."""

    requested: list[str]
    cut_after: int | None = None
    """Bytes after which a connection breaks; others wait there until `released`."""
    released: threading.Event

    def do_GET(self) -> None:
        self.requested.append(self.path.rpartition("/")[2])
        super().do_GET()

    def copyfile(self, source: Any, outputfile: Any) -> None:
        if self.cut_after is None:
            super().copyfile(source, outputfile)
            return
        outputfile.write(source.read(self.cut_after))
        outputfile.flush()
        self.released.wait(60)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


@contextlib.contextmanager
def serving(folder: Path, **settings: Any) -> Iterator[tuple[str, type[Server]]]:
    """Serve a folder on loopback; give its address and what was requested."""
    fresh = {"requested": [], "released": threading.Event()}
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


def test_a_set_is_fetched_into_torchvisions_layout(
    published: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from torchvision.datasets import FashionMNIST

    with serving(published) as (address, server):
        fetch("fashion-mnist", tmp_path, address + "/")
        assert [*dict.fromkeys(server.requested)] == FILES
        assert there(tmp_path) == WHOLE
        server.requested.clear()
        fetch("fashion-mnist", tmp_path, address)  # whole: nothing to do
        assert server.requested == []
    assert capfd.readouterr() == ("", "")
    assert len(FashionMNIST(tmp_path, train=False)) == 10000
    arrays = read("fashion-mnist", tmp_path)
    assert arrays["train_inputs"].shape == (60000, 1, 28, 28)
    assert arrays["val_inputs"].shape == (10000, 1, 28, 28)
    assert (np.bincount(arrays["train_labels"]) == 6000).all()


def test_files_that_are_whole_stay_and_others_are_replaced(
    published: Path, tmp_path: Path
) -> None:
    fetch("fashion-mnist", tmp_path, published.as_uri())
    raw = tmp_path / RAW
    images = "t10k-images-idx3-ubyte"
    (raw / LABELS).write_bytes((raw / LABELS).read_bytes()[:-1])  # its .gz is whole
    (raw / images).write_bytes(b"")
    (raw / f"{images}.gz").write_bytes(b"")
    with serving(published) as (address, server):
        fetch("fashion-mnist", tmp_path, address)
        assert {*server.requested} == {f"{images}.gz"}
    assert there(tmp_path) == WHOLE
    read("fashion-mnist", tmp_path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (gzip.compress(b"other", mtime=0), "not found or corrupted"),
        (b"<html>log in first</html>", "not found or corrupted"),
        (None, "404"),
    ],
)
def test_what_a_server_has_instead_is_told(
    tmp_path: Path, content: bytes | None, words: str
) -> None:
    (tmp_path / "mirror").mkdir()
    if content is not None:
        (tmp_path / "mirror" / FILES[0]).write_bytes(content)
    with (
        serving(tmp_path / "mirror") as (address, _),
        pytest.raises(DataError, match=f"(?s)from {address}: .*{FILES[0]}.*{words}"),
    ):
        fetch("mnist", tmp_path / "data", address)
    assert there(tmp_path / "data") == []


# urllib leaves the socket that timed out to the garbage collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("breaks", [True, False])
def test_a_connection_that_breaks_or_falls_silent_leaves_nothing(
    published: Path, tmp_path: Path, breaks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torchvision_sets, "TIMEOUT_SECONDS", 0.5)
    released = threading.Event()
    if breaks:
        released.set()
    with (
        serving(published, cut_after=2000, released=released) as (address, _),
        pytest.raises(DataError, match="corrupted" if breaks else "timed out"),
    ):
        fetch("fashion-mnist", tmp_path, address)
    assert there(tmp_path) == []


def test_a_fetch_that_is_killed_leaves_nothing_that_is_read(
    published: Path, tmp_path: Path
) -> None:
    words = ["fetch", "fashion-mnist", "--data-dir", str(tmp_path), "--mirror"]
    with serving(published, cut_after=2000) as (address, server):
        command = [sys.executable, "-m", "mpitrain", *words, address]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        try:
            until = time.monotonic() + 120
            while not server.requested and time.monotonic() < until:
                assert process.poll() is None, process.stderr.read()
                time.sleep(0.1)
        finally:
            process.send_signal(signal.SIGKILL)
            process.communicate(timeout=60)
    assert find("fashion-mnist", tmp_path) is None
    fetch("fashion-mnist", tmp_path, published.as_uri())
    found = [name for name in there(tmp_path) if not name.startswith(".fetch-")]
    assert found == WHOLE


@pytest.mark.parametrize("name", list(torchvision_sets.CLASSES))
def test_without_a_network_the_error_says_what_to_do(tmp_path: Path, name: str) -> None:
    with serving(tmp_path) as (address, _):
        pass  # nobody listens there any more
    with pytest.raises(DataError, match="Connection refused") as caught:
        fetch(name, tmp_path, address)
    text = str(caught.value)
    assert f"from {address}: " in text
    assert f"python -m mpitrain fetch {name} --data-dir {tmp_path}" in text
    assert "login node" in text
    assert "--mirror" in text
    assert there(tmp_path) == []


@pytest.mark.parametrize("mirror", ["/some/folder", "host.org/files", "ftp://a/b", ""])
def test_a_mirror_that_is_no_address_is_refused(tmp_path: Path, mirror: str) -> None:
    with pytest.raises(UsageError, match=r"--mirror .*expected .*file:///"):
        fetch("mnist", tmp_path, mirror)


def test_a_data_dir_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"file.*: cannot be written: .*--data-dir"):
        fetch("fashion-mnist", tmp_path / "file", tmp_path.as_uri())


def test_cifar_is_fetched_and_extracted(
    cifar: tuple[str, Path], tmp_path: Path
) -> None:
    name, folder = cifar
    data = tmp_path / "fetched"
    with serving(tmp_path) as (address, server):
        fetch(name, data, address)
        path = next(path for path in (data / folder.name).iterdir())
        path.write_bytes(b"broken")
        fetch(name, data, address)  # again from the archive
        assert {*server.requested} == {next(tmp_path.glob("*.tar.gz")).name}
    for path in folder.iterdir():
        assert (data / folder.name / path.name).read_bytes() == path.read_bytes()


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


@pytest.mark.parametrize(
    ("words", "status", "text"),
    [
        ([], 2, "missing name"),
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
