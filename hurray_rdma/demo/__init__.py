"""The demo: two processes on this machine, a paged cache that goes from one to the other, and proof that it did.

This room starts processes, draws a batch, fills pages, has the engine move them, compares every token, and reports.
It uses the library as any application would; nothing imports it but the command line.
"""

from hurray_rdma.demo.config import DemoConfig, load_config
from hurray_rdma.demo.content import MismatchError
from hurray_rdma.demo.llm_report import LlmReport
from hurray_rdma.demo.llm_run import num_llm_steps, run_llm
from hurray_rdma.demo.report import DemoReport
from hurray_rdma.demo.run import num_steps, run_demo
from hurray_rdma.demo.supervisor import ProcessFailedError, Supervisor

__all__ = [
    "DemoConfig",
    "DemoReport",
    "LlmReport",
    "MismatchError",
    "ProcessFailedError",
    "Supervisor",
    "load_config",
    "num_llm_steps",
    "num_steps",
    "run_demo",
    "run_llm",
]
