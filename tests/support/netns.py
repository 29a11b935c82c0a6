"""Network namespaces of a test's own, joined by veth pairs whose rate the kernel shapes (tc tbf).

Needs root and iproute2. Where they are not to be had, :func:`missing` says why.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from types import TracebackType
from typing import Any

NETMASK = 24
TOOLS = ("ip", "tc")
_numbers = itertools.count()
_CLONE_NEWNET = 0x40000000
_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


class NetworkUnavailable(RuntimeError):
    """A command of iproute2 was refused."""


def _call(*command: str) -> str:
    program = shutil.which(command[0], path=_PATH)
    if program is None:
        raise NetworkUnavailable(f"{command[0]} is not installed (Debian: iproute2)")
    done = subprocess.run([program, *command[1:]], capture_output=True, text=True)
    if done.returncode != 0:
        raise NetworkUnavailable(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def _enter(namespace: int) -> None:
    if ctypes.CDLL(None, use_errno=True).setns(namespace, _CLONE_NEWNET) != 0:
        raise NetworkUnavailable(f"setns: {os.strerror(ctypes.get_errno())}")


class Network:
    """Hosts (namespaces) on one switch, which is a bridge in a namespace of its own.

    ``prefix``: the first three numbers of the hosts' addresses; they are counted from 1.
    """

    def __init__(self, hosts: list[str], prefix: str = "10.77.0") -> None:
        self.name = f"kvcore-{os.getpid()}-{next(_numbers)}"
        self.address = {host: f"{prefix}.{i}" for i, host in enumerate(hosts, 1)}
        self._made: list[str] = []
        try:
            self._make("switch")
            self._ip("switch", "link", "add", "switch", "type", "bridge")
            self._ip("switch", "link", "set", "switch", "up")
            for host in hosts:
                self._add(host)
        except NetworkUnavailable:
            self.close()
            raise

    def _make(self, host: str) -> None:
        _call("ip", "netns", "add", f"{self.name}-{host}")
        self._made.append(host)

    def _ip(self, host: str, *command: str) -> str:
        return _call("ip", "-n", f"{self.name}-{host}", *command)

    def _add(self, host: str) -> None:
        self._make(host)
        port = f"port-{host}"[:15]
        self._ip(host, "link", "add", "eth0", "type", "veth", "peer", "name", port,
                 "netns", f"{self.name}-switch")  # fmt: skip
        self._ip(host, "addr", "add", f"{self.address[host]}/{NETMASK}", "dev", "eth0")
        for device in ("lo", "eth0"):
            self._ip(host, "link", "set", device, "up")
        self._ip("switch", "link", "set", port, "master", "switch", "up")

    def set_congestion_control(self, host: str, name: str) -> None:
        """Of the TCP connections that this host opens from now on."""
        subnet = self.address[host].rsplit(".", 1)[0] + f".0/{NETMASK}"
        self._ip(host, "route", "replace", subnet, "dev", "eth0", "congctl", name)

    def shape(self, host: str, bytes_per_s: float, queue_bytes: int, burst_bytes: int) -> None:
        """What reaches ``host`` leaves the switch at this rate, counted on the wire."""
        _call("tc", "-n", f"{self.name}-switch", "qdisc", "replace", "dev", f"port-{host}"[:15],
              "root", "tbf", "rate", f"{int(bytes_per_s * 8)}bit", "burst", str(burst_bytes),
              "limit", str(queue_bytes))  # fmt: skip

    def cut(self, host: str) -> None:
        """Its cable is pulled at the switch: nothing comes through, and nobody is told."""
        self._ip("switch", "link", "set", f"port-{host}"[:15], "nomaster")

    def dropped(self, host: str) -> int:
        """Packets that found the queue towards ``host`` full, since it was shaped."""
        shown = _call("tc", "-n", f"{self.name}-switch", "-s", "qdisc", "show", "dev",
                      f"port-{host}"[:15])  # fmt: skip
        return int(shown.split("(dropped ")[1].split(",")[0])

    def popen(self, host: str, command: list[str], **options: Any) -> subprocess.Popen[str]:
        """A program on this host."""
        ip = shutil.which("ip", path=_PATH)
        assert ip is not None
        return subprocess.Popen(
            [ip, "netns", "exec", f"{self.name}-{host}", *command], text=True, **options
        )

    @contextlib.contextmanager
    def inside(self, host: str) -> Iterator[None]:
        """This thread, and threads and processes that it starts, are on this host."""
        with open(f"/proc/self/task/{threading.get_native_id()}/ns/net") as before:
            with open(f"/run/netns/{self.name}-{host}") as there:
                _enter(there.fileno())
            try:
                yield
            finally:
                _enter(before.fileno())

    def close(self) -> None:
        """Remove all of it."""
        for host in self._made:
            _call("ip", "netns", "del", f"{self.name}-{host}")
        self._made.clear()

    def __enter__(self) -> Network:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


@functools.cache
def missing() -> str:
    """Why there are no shaped namespaces here; empty = there are."""
    try:
        with Network(["probe"], "10.78.0") as network:
            network.shape("probe", 1e6, 1 << 20, 1 << 16)
    except NetworkUnavailable as error:
        return str(error)
    return ""
