"""The guest's kernel and initramfs, made from Debian's linux-image package and kept in a cache.

Nothing is installed: the package is downloaded with apt-get, unpacked below the cache folder
(``$XDG_CACHE_HOME/kvcore/rdma-vm``), and an initramfs with busybox and the few modules is packed.
"""

from __future__ import annotations

import gzip
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
EARLY_MODULES = ("virtio_pci", "virtio_console", "9pnet_virtio", "9p", "overlay")  # to reach /
LATE_MODULES = ("virtio_net", "dummy", "sch_netem", "sch_tbf", "ib_uverbs", "rdma_ucm", "rdma_rxe")
# What rdma_rxe asks for by alias, which modules.dep does not know.
SOFT_DEPENDENCIES = ("crc32_generic", "crc32c_generic", "udp_tunnel", "ip6_udp_tunnel")


@dataclass(frozen=True)
class BootFiles:
    """What QEMU's direct boot takes, and the release name of the kernel."""

    vmlinuz: Path
    initramfs: Path
    release: str


def cache_folder() -> Path:
    """Where downloads are kept: outside the repository, named by XDG."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "kvcore" / "rdma-vm"


def boot_files() -> BootFiles:
    """Kernel and initramfs, downloaded and packed when the cache has none that is current."""
    cache = cache_folder()
    cache.mkdir(parents=True, exist_ok=True)
    root = cache / "kernel"
    if not root.is_dir():
        _download(root)
    release = next((root / "lib/modules").iterdir()).name
    initramfs = cache / f"initramfs-{release}.cpio.gz"
    sources = (Path(__file__), HERE / "init.sh", HERE / "guest.sh", HERE / "net.sh")
    newest = max(path.stat().st_mtime for path in sources)
    if not initramfs.exists() or initramfs.stat().st_mtime < newest:
        _pack(root / "lib/modules" / release, release, initramfs)
    return BootFiles(root / "boot" / f"vmlinuz-{release}", initramfs, release)


def _download(root: Path) -> None:
    """Fetch and unpack the newest kernel package; the folder appears whole or not at all."""
    listed = _apt_depends()
    if not listed:
        subprocess.run(["apt-get", "update", "-qq"], check=True)
        listed = _apt_depends()
    if not listed:
        raise RuntimeError("apt-cache knows no linux-image-amd64: is a Debian source configured?")
    with tempfile.TemporaryDirectory(dir=root.parent) as folder:
        subprocess.run(
            ["apt-get", "download", "-qq", "-o", "APT::Sandbox::User=root", listed[0]],
            cwd=folder,
            check=True,
        )
        package = next(Path(folder).glob("*.deb"))
        unpacked = Path(folder) / "kernel"
        subprocess.run(["dpkg", "-x", str(package), str(unpacked)], check=True)
        release = next((unpacked / "lib/modules").iterdir()).name
        subprocess.run([_depmod(), "-b", str(unpacked), release], check=True)
        unpacked.rename(root)


def _apt_depends() -> list[str]:
    done = subprocess.run(
        ["apt-cache", "depends", "linux-image-amd64"], capture_output=True, text=True, check=False
    )
    return [line.split()[-1] for line in done.stdout.splitlines() if "Depends:" in line]


def _modules_needed(folder: Path) -> set[str]:
    """Paths below the modules folder of every wanted module and what each depends on."""
    depends: dict[str, list[str]] = {}
    by_name: dict[str, str] = {}
    for line in (folder / "modules.dep").read_text().splitlines():
        file, _, needed = line.partition(":")
        depends[file] = needed.split()
        by_name[_module_name(file)] = file
    built_in = {_module_name(x) for x in (folder / "modules.builtin").read_text().splitlines()}
    wanted: set[str] = set()
    for name in (*EARLY_MODULES, *LATE_MODULES):
        if name in built_in:
            continue
        if name not in by_name:
            raise RuntimeError(f"kernel {folder.name} has no module {name}")
        wanted |= {by_name[name], *depends[by_name[name]]}
    for name in SOFT_DEPENDENCIES:
        if name in by_name:
            wanted |= {by_name[name], *depends[by_name[name]]}
    return wanted


def _module_name(path: str) -> str:
    return Path(path).name.split(".ko")[0].replace("-", "_")


def _pack(modules: Path, release: str, target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        tree = Path(folder)
        for name in ("bin", "proc", "sys", "dev", f"lib/modules/{release}"):
            (tree / name).mkdir(parents=True, exist_ok=True)
        shutil.copy(_busybox(), tree / "bin/busybox")
        for name in _modules_needed(modules):
            copy = tree / "lib/modules" / release / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(modules / name, copy)
        for name in ("modules.builtin", "modules.order", "modules.builtin.modinfo"):
            shutil.copy(modules / name, tree / "lib/modules" / release / name)
        subprocess.run([_depmod(), "-b", str(tree), release], check=True)
        for script in ("init.sh", "guest.sh", "net.sh"):
            text = (HERE / script).read_text()
            text = text.replace("@EARLY@", " ".join(EARLY_MODULES))
            (tree / script).write_text(text.replace("@LATE@", " ".join(LATE_MODULES)))
            (tree / script).chmod(0o755)
        (tree / "init.sh").rename(tree / "init")
        names = subprocess.run(["find", ".", "-print0"], cwd=tree, capture_output=True, check=True)
        archive = subprocess.run(
            ["cpio", "--null", "-o", "-H", "newc", "--quiet"],
            cwd=tree,
            input=names.stdout,
            capture_output=True,
            check=True,
        )
        whole = target.with_suffix(".new")
        whole.write_bytes(gzip.compress(archive.stdout, 1))
        whole.rename(target)


def _depmod() -> str:
    """It lies where the search path of a user often does not lead."""
    found = shutil.which("depmod", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    if found is None:
        raise RuntimeError("depmod is missing: apt-get install kmod")
    return found


def _busybox() -> str:
    found = shutil.which("busybox")
    if found is None:
        raise RuntimeError(f"no busybox: install the packages of {HERE / 'packages.txt'}")
    return found
