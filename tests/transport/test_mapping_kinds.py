"""What kind of shared memory a line of ``/proc/self/maps`` says, of kinds that this machine may not have."""

from __future__ import annotations

import pytest

from hurray_rdma.transport.mappings import _LINE, _kind


@pytest.mark.parametrize(
    ("mode", "path", "kind"),
    [
        ("rw-s", "/dev/xpmem", "xpmem"),
        ("rw-s", "/SYSV00000000 (deleted)", "sysv"),
        ("rw-s", "/dev/shm/ucx_shm_posix_1", "posix"),
        ("rw-s", "/some/file", "shared"),
        ("rw-p", "/dev/xpmem", "private"),
    ],
)
def test_kind(mode: str, path: str, kind: str) -> None:
    found = _LINE.match(f"7f0000000000-7f0000001000 {mode} 00000000 00:05 77{' ' * 26}{path}")
    assert found is not None
    assert _kind(found) == kind
