"""The connector for vLLM: `HurrayConnector`, named in `--kv-transfer-config` as ``hurray_rdma.connectors.vllm``.

Importing the package does not import vLLM; taking `HurrayConnector` from it does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hurray_rdma.connectors.vllm.connector import HurrayConnector

__all__ = ["HurrayConnector"]


def __getattr__(name: str) -> object:
    if name == "HurrayConnector":
        from hurray_rdma.connectors.vllm.connector import HurrayConnector  # noqa: PLC0415

        return HurrayConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
