"""The CUDA driver's numbers and the calls that need no device. What needs one is marked ``gpu``."""

from __future__ import annotations

import ctypes
import importlib

import pytest

from hurray_rdma.errors import TransportError
from hurray_rdma.transport import cuda
from hurray_rdma.transport.cuda import CudaDriver, MemoryType, Trait


def has_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def test_the_numbers_are_those_of_cuda_h() -> None:
    bindings = pytest.importorskip("cuda.bindings.driver", exc_type=ImportError)
    devices, pointers = bindings.CUdevice_attribute, bindings.CUpointer_attribute
    prefix = "CU_DEVICE_ATTRIBUTE_"
    assert {
        each: int(getattr(devices, prefix + name))
        for each, name in {
            Trait.STREAMS_FLUSH: "CAN_FLUSH_REMOTE_WRITES",
            Trait.USES_HOST_PAGE_TABLES: "PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES",
            Trait.GPU_DIRECT_RDMA: "GPU_DIRECT_RDMA_SUPPORTED",
            Trait.FLUSH_OPTIONS: "GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS",
            Trait.WRITES_ORDERING: "GPU_DIRECT_RDMA_WRITES_ORDERING",
            Trait.DMA_BUF: "DMA_BUF_SUPPORTED",
        }.items()
    } == {each: each.value for each in Trait}
    for each in cuda._PointerTrait:
        assert int(getattr(pointers, f"CU_POINTER_ATTRIBUTE_{each.name}")) == each
    for kind in MemoryType:
        assert int(getattr(bindings.CUmemorytype, f"CU_MEMORYTYPE_{kind.name}")) == kind
    assert int(bindings.CUresult.CUDA_ERROR_INVALID_VALUE) == cuda._INVALID_VALUE
    assert int(bindings.CUresult.CUDA_ERROR_INVALID_CONTEXT) == cuda._INVALID_CONTEXT
    assert int(bindings.CUresult.CUDA_ERROR_NOT_READY) == cuda._NOT_READY
    assert int(bindings.CUresult.CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED) == cuda._PINNED_ALREADY
    assert int(bindings.CUresult.CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED) == cuda._NOT_PINNED
    assert int(bindings.CUevent_flags.CU_EVENT_DISABLE_TIMING) == cuda._DISABLE_TIMING
    assert int(bindings.CUstream_flags.CU_STREAM_NON_BLOCKING) == cuda._NON_BLOCKING
    assert int(bindings.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ) == cuda._WAIT_GEQ
    assert int(bindings.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_FLUSH) == cuda._WAIT_FLUSH
    assert int(bindings.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL) == cuda._CAPTURE_THREAD_LOCAL
    assert int(bindings.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE) == 0
    target = bindings.CUflushGPUDirectRDMAWritesTarget.CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX
    assert int(target) == cuda._FLUSH_CURRENT_CONTEXT
    assert (bindings.CU_MEMHOSTALLOC_PORTABLE, bindings.CU_MEMHOSTALLOC_DEVICEMAP) == (cuda._PORTABLE, cuda._DEVICE_MAP)
    assert cuda._PORTABLE == bindings.CU_MEMHOSTREGISTER_PORTABLE


@pytest.mark.skipif(has_driver(), reason="there is a CUDA driver here")
def test_a_missing_driver_is_named_with_the_way_out() -> None:
    with pytest.raises(TransportError, match=r"there is no CUDA driver here.*--gpus all"):
        CudaDriver()


def test_importing_the_room_needs_no_driver() -> None:
    assert importlib.import_module("hurray_rdma.transport").Context().device_kinds[0] == "cpu"
