"""Several hosts on one machine: each a network namespace with a name and an sshd.

Files and processes are shared, as on a cluster with a shared file system. The
bridge that joins the hosts lives in a namespace of its own, the login node's, so
that the machine's own network never sees it: no route, no address, no name.

`ip netns exec` lays what is in `/etc/netns/<namespace>/` over `/etc`, in a mount
namespace that ends with the command. That gives every host its own `/etc/hosts`
and `/etc/ssh`, and leaves the machine's untouched.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TextIO

from .needs import SEARCH_PATH, which

LOGIN = "login"
"""The host where a user sits: it has the bridge, and no daemon of a job."""

PREFIX = "mpitrain-"
"""Namespaces are this and the host's name, so that they are surely ours."""

FOLDERS = Path("/tmp")
"""Not TMPDIR: others must reach munge's socket, and that may be one's own."""

FOLDER_PREFIX = "mpitrain-hosts-"
OVERLAYS = Path("/etc/netns")
DISK = "disk"
AUTOGROUP = Path("/proc/sys/kernel/sched_autogroup_enabled")
AUTOGROUP_BEFORE = Path("/run/mpitrain-virtual-hosts.autogroup")
LOCK = Path("/run/mpitrain-virtual-hosts.lock")
LOCK_SECONDS = 600
NOT_INHERITED = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "SLURM_", "PBS_", "MPI")

SSHD_CONFIG = """\
HostKey /etc/ssh/key
AuthorizedKeysFile /etc/ssh/key.pub
PidFile none
PermitRootLogin yes
PasswordAuthentication no
StrictModes no
UsePAM no
MaxStartups 100
SetEnv TMPDIR={tmpdir}
"""

SSH_CONFIG = """\
Host *
    IdentityFile /etc/ssh/key
    GlobalKnownHostsFile /etc/ssh/known_hosts
    UserKnownHostsFile /dev/null
    StrictHostKeyChecking yes
    BatchMode yes
"""


class VirtualHosts:
    """Hosts `node1`, `node2`, ... and `login`; made by `virtual_hosts`."""

    def __init__(self, folder: Path, count: int) -> None:
        self.folder = folder
        self.names = [f"node{i}" for i in range(1, count + 1)]
        self.addresses = {name: f"10.99.0.{i}" for i, name in enumerate(self.names, 1)}
        self.addresses[LOGIN] = "10.99.0.254"
        # What killed jobs leave goes with the hosts: Open MPI refuses to start where it
        # finds a folder of a dead mpirun or prted that had its process id.
        self.tmpdir = folder / "tmp"
        self.disk = folder / DISK  # all hosts' own file system, which a test may fill
        self.environ = {**clean_environ(), "TMPDIR": str(self.tmpdir)}
        self._daemons: list[subprocess.Popen[bytes]] = []

    def run(
        self,
        host: str,
        command: list[str],
        *,
        cwd: Path | None = None,
        timeout_seconds: int = 60,
        environ: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on a host to its end, which comes within the time given.

        Returns:
            Standard output and error together as text; status 124 or 137 when
            the time was over.
        """
        bound = ["timeout", "-k", "5", str(timeout_seconds)]
        return subprocess.run(
            [*bound, *self._on(host), *command],
            check=False,
            cwd=cwd or self.folder,
            env={**self.environ, **(environ or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )

    def start(self, host: str, command: list[str]) -> None:
        """Start a daemon on a host, in the foreground; its log is in the folder."""
        program = which(command[0]) or command[0]
        with (self.folder / f"{Path(program).name}-{host}.log").open("ab") as log:
            daemon = subprocess.Popen(
                [*self._on(host), program, *command[1:]],
                cwd=self.folder,
                env=self.environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._daemons.append(daemon)

    @contextmanager
    def named_as_debian_does(self) -> Iterator[None]:
        """Let each host's own name lead to 127.0.1.1, as Debian's installer does."""
        with ExitStack() as stack:
            for host in self.names:
                own = f"{self.addresses[host]} {host}\n"
                change = self._changed(host, "hosts", own, f"127.0.1.1 {host}\n")
                stack.enter_context(change)
            yield

    @contextmanager
    def without_ssh(self) -> Iterator[None]:
        """Let no host reach another by ssh: nobody listens where they knock."""
        with ExitStack() as stack:
            for host in self.names:
                change = self._changed(host, "ssh/ssh_config", "*\n", "*\n Port 9\n")
                stack.enter_context(change)
            yield

    @contextmanager
    def _changed(self, host: str, name: str, old: str, new: str) -> Iterator[None]:
        path = OVERLAYS / (PREFIX + host) / name
        before = path.read_text()
        assert old in before
        # Written in place: the file is bound into running mount namespaces.
        path.write_text(before.replace(old, new))
        try:
            yield
        finally:
            path.write_text(before)

    def logs(self) -> str:
        """Return the end of every daemon's log, for the message of a failure."""
        parts = [
            f"--- {path.name}\n{path.read_text(errors='replace')[-1000:]}"
            for path in sorted(self.folder.glob("*.log"))
        ]
        return "\n".join(parts)

    def _on(self, host: str) -> list[str]:
        named = ["unshare", "--uts", "sh", "-c", 'hostname "$0"; exec "$@"', host]
        return ["ip", "netns", "exec", PREFIX + host, *named]

    def _build(self) -> None:
        self._write_overlays()
        self.disk.mkdir()
        # Before the hosts: no later mount is seen in their mount namespaces.
        mount("-t", "tmpfs", "-o", "size=1g", "tmpfs", str(self.disk))
        login = PREFIX + LOGIN
        ip("netns", "add", login)
        ip("-n", login, "link", "add", "bridge", "type", "bridge")
        ip("-n", login, "address", "add", self._network(LOGIN), "dev", "bridge")
        ip("-n", login, "link", "set", "lo", "up")
        ip("-n", login, "link", "set", "bridge", "up")
        for name in self.names:
            space = PREFIX + name
            ip("netns", "add", space)
            peer = ["peer", "name", name, "netns", login]
            ip("link", "add", "eth0", "netns", space, "type", "veth", *peer)
            ip("-n", login, "link", "set", name, "master", "bridge", "up")
            ip("-n", space, "address", "add", self._network(name), "dev", "eth0")
            ip("-n", space, "link", "set", "lo", "up")
            ip("-n", space, "link", "set", "eth0", "up")
            self.start(name, ["sshd", "-D", "-e"])
        for name in self.names:
            self.wait_for(LOGIN, ["ssh", name, "true"], f"sshd on {name}")

    def _network(self, name: str) -> str:
        return f"{self.addresses[name]}/24"

    def _write_overlays(self) -> None:
        ssh = self.folder / "ssh"
        ssh.mkdir()
        self.tmpdir.mkdir()
        key = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(ssh / "key")]
        subprocess.run(key, check=True)
        (ssh / "sshd_config").write_text(SSHD_CONFIG.format(tmpdir=self.tmpdir))
        (ssh / "ssh_config").write_text(SSH_CONFIG)
        (ssh / "known_hosts").write_text("* " + (ssh / "key.pub").read_text())
        Path("/run/sshd").mkdir(exist_ok=True)  # sshd's empty folder, in a tmpfs
        names = "".join(f"{addr} {name}\n" for name, addr in self.addresses.items())
        for host in self.addresses:
            overlay = OVERLAYS / (PREFIX + host)
            overlay.mkdir(parents=True)
            (overlay / "hosts").write_text("127.0.0.1 localhost\n" + names)
            shutil.copytree(ssh, overlay / "ssh")

    def wait_for(self, host: str, command: list[str], what: str) -> None:
        """Try a command until it succeeds, for half a minute."""
        end = time.monotonic() + 30
        while (tried := self.run(host, command, timeout_seconds=10)).returncode:
            if time.monotonic() > end:
                raise TimeoutError(f"{what}: {tried.stdout}\n{self.logs()}")
            time.sleep(0.2)


@contextmanager
def virtual_hosts(count: int) -> Iterator[VirtualHosts]:
    """Make hosts, and take away all of them at the end, with all they run.

    Only one set at a time is on a machine; a second one waits. What a killed
    run left behind is taken away first.
    """
    with LOCK.open("w") as lock:
        _take(lock)
        sweep()
        folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX, dir=FOLDERS))
        hosts = VirtualHosts(folder, count)
        try:
            hosts._build()
            with _cores_for_all():
                yield hosts
        finally:
            sweep()
            for daemon in hosts._daemons:
                daemon.wait(timeout=10)


@contextmanager
def _cores_for_all() -> Iterator[None]:
    """Let Linux give out cores by process, and not by session, where it can.

    Each host's ranks are a session of its sshd, and the hosts share the machine's
    cores. With sched_autogroup (sched(7)) a rank that spins in MPI was seen to keep one
    of another host, bound to the same core, from run_scripts for up to a minute.
    """
    if not os.access(AUTOGROUP, os.W_OK):
        yield
        return
    AUTOGROUP_BEFORE.write_text(AUTOGROUP.read_text())
    AUTOGROUP.write_text("0")
    try:
        yield
    finally:
        _share_cores_as_before()


def _share_cores_as_before() -> None:
    if AUTOGROUP_BEFORE.exists():
        AUTOGROUP.write_text(AUTOGROUP_BEFORE.read_text())
        AUTOGROUP_BEFORE.unlink()


def _take(lock: TextIO) -> None:
    end = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > end:
                message = f"another run keeps {LOCK} for {LOCK_SECONDS} s"
                raise TimeoutError(message) from None
            time.sleep(1)
        else:
            return


def sweep() -> None:
    """End every process in our namespaces, by its id, and remove what we made."""
    _share_cores_as_before()
    listed = ip("netns", "list").split("\n")
    spaces = [line.split()[0] for line in listed if line.startswith(PREFIX)]
    for number, seconds in ((signal.SIGTERM, 2.0), (signal.SIGKILL, 5.0)):
        end = time.monotonic() + seconds
        while (pids := _pids(spaces)) and time.monotonic() < end:
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
            time.sleep(0.1)
    for space in spaces:
        ip("netns", "delete", space)
    for overlay in OVERLAYS.glob(PREFIX + "*"):
        shutil.rmtree(overlay)
    with suppress(OSError):  # others' overlays stay
        OVERLAYS.rmdir()
    for folder in FOLDERS.glob(FOLDER_PREFIX + "*"):
        if (folder / DISK).is_mount():
            subprocess.run(["umount", "--lazy", str(folder / DISK)], check=True)
        shutil.rmtree(folder, ignore_errors=True)


def _pids(spaces: list[str]) -> list[int]:
    return [int(pid) for space in spaces for pid in ip("netns", "pids", space).split()]


def ip(*words: str) -> str:
    """Run the `ip` command and return what it prints."""
    command = [which("ip") or "ip", *words]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def mount(*words: str) -> None:
    """Run the `mount` command."""
    subprocess.run(["mount", *words], check=True)


def clean_environ() -> dict[str, str]:
    """Return this process's environment without an outer job's variables.

    Ranks that wait in MPI give their core away, as Open MPI lets them where a host has
    more ranks than cores: it does not see that these hosts share theirs.
    """
    kept = {k: v for k, v in os.environ.items() if not k.startswith(NOT_INHERITED)}
    allow_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    shares_cores = {"OMPI_MCA_mpi_yield_when_idle": "1"}
    return {**kept, **allow_root, **shares_cores, "PATH": SEARCH_PATH}
