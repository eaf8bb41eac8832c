"""The doctor's look at GPUs: driver, peer access, GPUDirect, the nearest network cards, and the lane that pages take.

Asks the CUDA driver and sysfs (`look`), and judges what they say (`judge`) without either.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from hurray_rdma.bench.findings import Finding, Verdict
from hurray_rdma.bench.machine import read_text
from hurray_rdma.errors import TransportError
from hurray_rdma.transport.cuda import CudaDriver, Trait, driver
from hurray_rdma.transport.devices import missing_flush

__all__ = ["Gpu", "GpuFacts", "check_gpus", "distance", "judge", "look"]

_NETWORK = ("rc_", "dc_", "ud_")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU as the driver and sysfs describe it."""

    name: str
    peers: tuple[int, ...]
    """GPUs of this machine whose memory it reaches by itself."""
    gpu_direct: bool
    """Whether the device and its driver have GPUDirect RDMA at all."""
    dma_buf: bool
    """Whether a network card can register its memory without nvidia-peermem."""
    flushed: bool
    """Whether remote writes must be flushed before kernels see them."""
    cards: tuple[str, ...]
    """RDMA devices with how far they are, the nearest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFacts:
    """What a machine says of its GPUs."""

    cuda: str
    """Version of CUDA that the driver has."""
    gpus: tuple[Gpu, ...]
    peer_memory: bool
    """Whether nvidia_peermem is loaded."""
    cupy: bool
    """Whether CuPy is installed."""


def check_gpus(transports: Collection[str]) -> list[Finding]:
    """A finding for each GPU, or why there is none.

    Args:
        transports: what UCX has.
    """
    try:
        facts = look(driver())
    except TransportError as error:
        if not Path("/proc/driver/nvidia").exists():
            return [Finding("GPU", Verdict.OK, "none")]
        return [Finding("GPU", Verdict.NOTE, f"the kernel has NVIDIA's driver, but {error.rule}", error.fix or "")]
    return judge(facts, transports)


def look(cuda: CudaDriver) -> GpuFacts:
    """Asks the driver and sysfs.

    Raises:
        TransportError: CUDA fails.
    """
    indices = range(cuda.num_devices)
    cards = {each.name: _pci_path(each / "device") for each in sorted(Path("/sys/class/infiniband").glob("*"))}
    gpus = []
    for index in indices:
        here = _pci_path(Path("/sys/bus/pci/devices") / cuda.pci_address(index))
        near = sorted((distance(here, there), name) for name, there in cards.items())
        gpus.append(
            Gpu(
                name=cuda.name(index),
                peers=tuple(other for other in indices if other != index and cuda.can_access(index, other)),
                gpu_direct=bool(cuda.trait(index, Trait.GPU_DIRECT_RDMA)),
                dma_buf=bool(cuda.trait(index, Trait.DMA_BUF)),
                flushed=missing_flush(cuda, index) is not None,
                cards=tuple(f"{name} ({_WHERE[steps]})" for steps, name in near),
            )
        )
    return GpuFacts(
        cuda=".".join(map(str, cuda.version)),
        gpus=tuple(gpus),
        peer_memory="nvidia_peermem" in read_text("/proc/modules"),
        cupy=importlib.util.find_spec("cupy") is not None,
    )


_WHERE = ("behind the same PCIe switch", "at the same PCIe root", "behind another root of the host")


def distance(one: Sequence[str], other: Sequence[str]) -> int:
    """How far two PCI devices are apart: 0 behind one switch, 1 at one root complex, 2 else.

    Args:
        one, other: their paths in sysfs from the root on, ``("pci0000:16", "0000:16:01.0", "0000:17:00.0")``.

    >>> distance(("pci0000:16", "0000:16:01.0", "0000:17:00.0"), ("pci0000:16", "0000:16:01.0", "0000:18:00.0"))
    0
    >>> distance(("pci0000:16", "0000:16:01.0", "0000:17:00.0"), ("pci0000:16", "0000:16:03.0", "0000:1a:00.0"))
    1
    """
    common = 0
    for here, there in zip(one[:-1], other[:-1], strict=False):
        if here != there:
            break
        common += 1
    return max(0, 2 - common)


def _pci_path(link: Path) -> tuple[str, ...]:
    parts = link.resolve().parts
    return parts[next((at for at, part in enumerate(parts) if part.startswith("pci")), 0) :]


def judge(facts: GpuFacts, transports: Collection[str]) -> list[Finding]:
    """A finding for each GPU: what it has, the lane that pages take, and why a fast one is missing.

    Args:
        facts: as of `look`.
        transports: what UCX has.
    """
    if not facts.gpus:
        return [Finding("GPU", Verdict.OK, f"none, though there is a driver (CUDA {facts.cuda})")]
    return [_judge(index, gpu, facts, transports) for index, gpu in enumerate(facts.gpus)]


def _judge(index: int, gpu: Gpu, facts: GpuFacts, transports: Collection[str]) -> Finding:
    what = f"GPU {index}"
    network = sorted(name for name in transports if name.startswith(_NETWORK))
    direct = "dma-buf" if gpu.dma_buf else "nvidia_peermem" if facts.peer_memory else ""
    direct = direct if gpu.gpu_direct else ""
    here = "by cuda_ipc" if "cuda_ipc" in transports else "staged through the host"
    apart = [other for other in range(len(facts.gpus)) if other != index and other not in gpu.peers]
    if apart and "cuda_ipc" in transports:
        here += f" (but staged through the host to GPUs {_listed(apart)})"
    there = f"{network[0]} by {direct}" if network and direct else "staged through the host"
    found = f"{gpu.name}, CUDA {facts.cuda}; reaches GPUs {_listed(gpu.peers)}; network cards {_listed(gpu.cards)}"
    found += f"; pages to a process of this host go {here}, to another host {there}"
    if gpu.flushed:
        found += "; what peers wrote is flushed before kernels see it"
    if not {"cuda_copy", "cuda_ipc"} <= set(transports):
        fix = "Install the libucx package of your CUDA version (libucx-cu12), and let UCX_TLS allow cuda"
        return Finding(what, Verdict.SLOW, f"{found}; UCX lacks CUDA's transports", fix)
    if gpu.cards and network and not direct:
        if not gpu.gpu_direct:
            why, fix = "this GPU or its driver has no GPUDirect RDMA", "Use host pools: PagePool.allocate(pinned=True)"
        else:
            why = "neither dma-buf nor nvidia_peermem"
            fix = "modprobe nvidia_peermem, or install NVIDIA's open kernel modules (dma-buf; kernel 5.12 or later)"
        return Finding(what, Verdict.SLOW, f"{found}; GPUDirect RDMA is missing: {why}", fix)
    if not facts.cupy:
        fix = "pip install 'hurray-rdma[gpu]', or make pools from torch tensors"
        return Finding(what, Verdict.NOTE, f"{found}; CuPy is not installed, which PagePool.allocate needs", fix)
    return Finding(what, Verdict.OK, found)


def _listed(names: Sequence[object]) -> str:
    return ", ".join(map(str, names)) or "none"
