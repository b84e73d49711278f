"""The network interfaces of this host: their class, their speed, their addresses."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path

# Classes of interfaces, the best first. "infiniband" includes Omni-Path, "slingshot"
# is HPE's (hsn0, hsn1 ...), "roce" is Ethernet on a card with RDMA, "virtual" has no
# card under it (veth, vxlan), a "bridge" joins such interfaces of one host (docker0).
# A bond, a VLAN or a bridge on a card is of the card's class.
KINDS = (
    *("infiniband", "slingshot", "roce", "ethernet", "wireless", "virtual", "tunnel"),
    *("bridge", "loopback"),
)

# https://www.kernel.org/doc/Documentation/ABI/testing/sysfs-class-net
SYS_CLASS_NET = Path("/sys/class/net")
# ARPHRD_* of Linux's include/uapi/linux/if_arp.h, as in /sys/class/net/<name>/type.
_ETHER, _INFINIBAND, _LOOPBACK = 1, 32, 772
_MAX_DEPTH = 4  # a bridge on a VLAN on a bond on a card


@dataclass(frozen=True, kw_only=True)
class Interface:
    """One interface of one host."""

    name: str  # as `ip address` prints it, such as "ib0"; "eth0:1" for a label
    kind: str  # one of `KINDS`
    speed_mbps: int = 0  # 0: unknown
    addresses: tuple[str, ...] = ()  # numeric, IPv4 first, then in the system's order

    def __str__(self) -> str:
        speed = f", {self.speed_mbps} Mb/s" if self.speed_mbps else ""
        return f"{self.name}, {self.kind}{speed}"


def find_interfaces(root: Path = SYS_CLASS_NET) -> tuple[Interface, ...]:
    """Return the interfaces of this host that are up and have an address."""
    import psutil

    running = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    found = []
    for name, entries in psutil.net_if_addrs().items():
        # psutil sorts by family and keeps the order of getifaddrs within each.
        addresses = tuple(
            entry.address.partition("%")[0]
            for entry in entries
            if entry.family in (socket.AF_INET, socket.AF_INET6)
        )
        if addresses and name in running:
            device = name.partition(":")[0]
            kind, speed = kind_of(device, root), speed_of(device, root)
            found.append(
                Interface(name=name, kind=kind, speed_mbps=speed, addresses=addresses)
            )
    return tuple(found)


def kind_of(name: str, root: Path = SYS_CLASS_NET, depth: int = 0) -> str:
    """Return the class of an interface; ``"virtual"`` where nothing is known."""
    folder = root / name
    kind = _read_number(folder / "type")
    if kind == _LOOPBACK:
        return "loopback"
    if kind == _INFINIBAND:
        return "infiniband"
    if (folder / "wireless").exists() or (folder / "phy80211").exists():
        return "wireless"
    # A TAP device calls itself Ethernet. 0: the type cannot be read.
    if (folder / "tun_flags").exists() or kind not in (_ETHER, 0):
        return "tunnel"
    if (folder / "device").exists():
        if name.startswith("hsn") or (folder / "device" / "cxi").exists():
            return "slingshot"
        return "roce" if (folder / "device" / "infiniband").exists() else "ethernet"
    without_card = "bridge" if (folder / "bridge").exists() else "virtual"
    lower = [path.name.removeprefix("lower_") for path in folder.glob("lower_*")]
    if depth == _MAX_DEPTH or not lower:
        return without_card
    best = min((kind_of(part, root, depth + 1) for part in lower), key=KINDS.index)
    return best if KINDS.index(best) < KINDS.index("virtual") else without_card


def speed_of(name: str, root: Path = SYS_CLASS_NET) -> int:
    """Return the speed of an interface in Mb/s; 0 where it is not known."""
    return max(0, _read_number(root / name / "speed"))


def slingshot_names(root: Path = SYS_CLASS_NET) -> list[str]:
    """Return the interfaces of this node that are Slingshot's and up, by number."""
    up = (it.name for it in root.glob("*") if sysfs_text(it / "operstate") == "up")
    names = [name for name in up if kind_of(name, root) == "slingshot"]
    return sorted(names, key=lambda name: (len(name), name))


def is_usable(address: str) -> bool:
    """Whether other hosts can use an address; a link-local one of IPv6 they cannot."""
    return not address.lower().startswith(("fe8", "fe9", "fea", "feb"))


def _read_number(path: Path) -> int:
    try:
        return int(sysfs_text(path))
    except ValueError:
        return 0


def sysfs_text(path: Path) -> str:
    """Return the text of a file of the kernel; ``""`` where it has none."""
    try:
        return path.read_text().strip()
    except OSError:  # an interface that is down refuses to tell its speed
        return ""
