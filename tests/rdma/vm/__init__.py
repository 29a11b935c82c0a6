"""Small QEMU guests with a Soft-RoCE device: real verbs where no RDMA hardware is.

A guest boots Debian's own kernel (downloaded once into the cache) and sees this machine's root
read-only over 9p below a tmpfs overlay, so every program, library and virtual environment here runs
there unchanged. It is slow (TCG, one emulated instruction at a time): correctness, loss and death
are tested there, speed is not.
"""

from __future__ import annotations

from .machine import Death, Guest, GuestError, run

__all__ = ["Death", "Guest", "GuestError", "run"]
