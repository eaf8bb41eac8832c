"""Memory for the benchmark's yardsticks, and calls of libc that Python does not have. Knows bytes, not pages."""

from __future__ import annotations

import ctypes
import mmap
import os

import numpy as np
from numpy.typing import NDArray

__all__ = ["ask_for_huge_pages", "huge_nbytes", "libc", "private_memory", "write_into"]

_HUGE_NBYTES = 2 << 20
_MADV_HUGEPAGE = 14
_IOV_MAX = 1024

libc = ctypes.CDLL(None, use_errno=True)
libc.process_vm_writev.restype = ctypes.c_ssize_t


def private_memory(nbytes: int, *, huge_pages: bool) -> NDArray[np.uint8]:
    """Anonymous memory of this process, touched, uint8 ``[nbytes]``; begins at a multiple of 2 MiB.

    Of its own mapping: memcpy runs at a fraction of its speed between addresses of different alignment.
    """
    memory = np.frombuffer(mmap.mmap(-1, nbytes + _HUGE_NBYTES), np.uint8)
    start = -memory.ctypes.data % _HUGE_NBYTES
    memory = memory[start : start + nbytes]
    if huge_pages:
        ask_for_huge_pages(memory)
    memory.fill(1)
    return memory


def ask_for_huge_pages(memory: NDArray[np.uint8]) -> None:
    """``madvise(MADV_HUGEPAGE)``; the kernel may ignore it, or not know it: `huge_nbytes` tells."""
    start = -memory.ctypes.data % mmap.PAGESIZE
    length = (memory.nbytes - start) // mmap.PAGESIZE * mmap.PAGESIZE
    if length > 0:
        libc.madvise(ctypes.c_void_p(memory.ctypes.data + start), ctypes.c_size_t(length), _MADV_HUGEPAGE)


def huge_nbytes() -> int:
    """Bytes of this process that huge pages map."""
    with open("/proc/self/smaps_rollup", encoding="ascii") as smaps:
        fields = dict(line.split(":", 1) for line in smaps if ":" in line and " kB" in line)
    names = ("AnonHugePages", "ShmemPmdMapped", "Shared_Hugetlb", "Private_Hugetlb")
    return sum(int(fields[name].split()[0]) * 1024 for name in names if name in fields)


def write_into(pid: int, *, src: NDArray[np.uint64], dst: NDArray[np.uint64], lengths: NDArray[np.uint64]) -> None:
    """``process_vm_writev``: pieces of this process's memory into another's, 1024 a call. Releases the GIL.

    Args:
        pid: the other process.
        src: addresses here, uint64 ``[n]``.
        dst: addresses there, uint64 ``[n]``.
        lengths: bytes, uint64 ``[n]``.

    Raises:
        OSError: the kernel refuses (no ptrace permission), or writes less than asked.
    """
    local = np.column_stack([src, lengths])
    remote = np.column_stack([dst, lengths])
    for start in range(0, len(src), _IOV_MAX):
        count = min(_IOV_MAX, len(src) - start)
        done = libc.process_vm_writev(
            pid,
            ctypes.c_void_p(local.ctypes.data + start * 16),
            ctypes.c_ulong(count),
            ctypes.c_void_p(remote.ctypes.data + start * 16),
            ctypes.c_ulong(count),
            ctypes.c_ulong(0),
        )
        if done < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), "process_vm_writev")
        if done != int(lengths[start : start + count].sum()):
            raise OSError(0, f"wrote {done} bytes only", "process_vm_writev")
