"""Start guests, run one command in each, and bring back exit codes and output."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .kernel import BootFiles, boot_files

TIMED_OUT, KILLED, FAILED = 124, 137, 125  # exit codes of a guest that gave none itself


class GuestError(RuntimeError):
    """A guest did not come up; the message carries the end of its console."""


@dataclass(frozen=True)
class Death:
    """Take the power from a guest, `after_s` seconds after guest 0 began its command."""

    guest: int
    after_s: float


@dataclass
class Guest:
    """What became of one guest: its command's exit code and all it wrote."""

    number: int
    code: int = FAILED
    output: str = ""
    seconds: float = 0.0


@dataclass
class _Running:
    number: int
    process: subprocess.Popen[bytes]
    folder: Path
    killed: bool = False
    started: float = field(default_factory=time.monotonic)

    def began(self) -> bool:
        return (self.folder / f"began.{self.number}").exists()

    def code(self) -> int | None:
        path = self.folder / f"code.{self.number}"
        return int(path.read_text()) if path.exists() else None

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


def run(
    commands: Sequence[str],
    *,
    share: Path | None = None,
    timeout_s: float = 300,
    memory_mib: int = 1536,
    cpus: int = 2,
    death: Death | None = None,
) -> list[Guest]:
    """Boot one guest per command (at most 2, on one network) and wait for all of them.

    Guest n has the address 10.77.0.(n + 1). `share` is mounted read-write at /share, which is
    where the commands start. When guest 0 ends, the others have 10 s to end too.

    Raises GuestError when guest 0 never began its command.
    """
    if not 1 <= len(commands) <= 2:
        raise ValueError(f"commands: {len(commands)} given, 1 or 2 guests can run")
    boot = boot_files()
    with tempfile.TemporaryDirectory(prefix="kvcore-vm.") as scratch:
        root = (share or Path(scratch) / "share").resolve()
        folder = root / ".vm"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        guests: list[_Running] = []
        try:
            for number in reversed(range(len(commands))):  # the last one listens for the network
                (folder / f"command.{number}").write_text(commands[number] + "\n")
                line = _qemu(boot, number, len(commands), root, scratch, memory_mib, cpus)
                with open(folder / f"qemu.{number}", "wb") as log:
                    process = subprocess.Popen(line, stdin=subprocess.DEVNULL, stderr=log)
                guests.insert(0, _Running(number, process, folder))
                if number > 0:
                    _wait_for(Path(scratch) / "net", process)
            timed_out = _watch(guests, timeout_s, death)
        finally:
            for guest in guests:
                guest.stop()
        return [_collect(guest, timed_out) for guest in guests]


def _qemu(
    boot: BootFiles, number: int, total: int, share: Path, scratch: str, memory: int, cpus: int
) -> list[str]:
    folder = share / ".vm"
    line = f"""qemu-system-x86_64 -accel tcg,thread=multi -M pc -cpu max -m {memory} -smp {cpus}
        -nodefaults -no-user-config -display none -no-reboot
        -kernel {boot.vmlinuz} -initrd {boot.initramfs} -serial file:{folder}/console.{number}
        -chardev file,id=c0,path={folder}/output.{number}
        -device virtio-serial-pci -device virtconsole,chardev=c0
        -fsdev local,id=root,path=/,security_model=none,readonly=on,multidevs=remap
        -device virtio-9p-pci,fsdev=root,mount_tag=root
        -fsdev local,id=share,path={share},security_model=none,multidevs=remap
        -device virtio-9p-pci,fsdev=share,mount_tag=share"""
    if total > 1:
        server = "off" if number == 0 else "on"
        line += f"""
            -netdev stream,id=n0,server={server},addr.type=unix,addr.path={scratch}/net
            -device virtio-net-pci,netdev=n0,mac=52:54:00:77:00:0{number + 1},host_mtu=4200,romfile=
        """
    kernel_line = (
        "console=ttyS0 quiet panic=-1 mitigations=off tsc=reliable no_timer_check nokaslr "
        f"kvcore_guest={number}"
    )
    return [*shlex.split(line), "-append", kernel_line]


def _wait_for(path: Path, process: subprocess.Popen[bytes], limit_s: float = 20) -> None:
    end = time.monotonic() + limit_s
    while not path.exists():
        if process.poll() is not None or time.monotonic() > end:
            raise GuestError(f"QEMU made no {path.name} socket (exit code {process.poll()})")
        time.sleep(0.02)


def _watch(guests: list[_Running], timeout_s: float, death: Death | None) -> bool:
    """Until every guest is off; True when the time ran out before guest 0 was done."""
    end = time.monotonic() + timeout_s
    began: float | None = None
    while any(guest.process.poll() is None for guest in guests):
        now = time.monotonic()
        if began is None and guests[0].began():
            began = now
        if death and began and now - began > death.after_s and not guests[death.guest].killed:
            guests[death.guest].killed = True
            guests[death.guest].process.kill()
        if now > end:
            return guests[0].code() is None
        if guests[0].process.poll() is not None:
            end = min(end, now + 10)
        time.sleep(0.05)
    return False


def _collect(guest: _Running, timed_out: bool) -> Guest:
    done = Guest(guest.number, seconds=time.monotonic() - guest.started)
    output = guest.folder / f"output.{guest.number}"
    if output.exists():
        done.output = output.read_text(errors="replace").replace("\r\n", "\n")
    code = guest.code()
    if code is not None:
        done.code = code
    elif guest.killed:
        done.code = KILLED
    elif timed_out or guest.began():
        done.code = TIMED_OUT
    elif guest.number == 0:
        console = guest.folder / "console.0"
        tail = console.read_text(errors="replace")[-3000:] if console.exists() else ""
        qemu = (guest.folder / "qemu.0").read_text(errors="replace")[-1000:]
        raise GuestError(f"guest 0 never began its command{os.linesep}{qemu}{tail}")
    return done
