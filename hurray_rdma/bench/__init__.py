"""The benchmark: what the engine does on this machine beside memcpy, the kernel's ways and other engines, in one run.

This room starts processes, has everyone move the same pages in turn, and reports ratios; and it says what is slow about
a machine (`hurray_rdma.bench.doctor`). It uses the library as any application would; only the command line imports it.

Bottom up: `case` (which pages), `measured` (numbers), `yardsticks`, `sending` and `receiving` (the two processes),
`pair` and `external` (processes from the outside), `rig` (everyone of a lane), `sections`, `run`; `results` is what
`table` and `page` show. `doctor` joins the looks of `limits` and `devices`.
"""

from hurray_rdma.bench.config import BenchConfig, load_config
from hurray_rdma.bench.document import check_report_folder
from hurray_rdma.bench.page import write_page
from hurray_rdma.bench.remote import num_remote_steps, run_remote
from hurray_rdma.bench.results import BenchReport
from hurray_rdma.bench.run import num_steps, run_bench
from hurray_rdma.bench.serve import Served, Serving, serve

__all__ = [
    "BenchConfig",
    "BenchReport",
    "Served",
    "Serving",
    "check_report_folder",
    "load_config",
    "num_remote_steps",
    "num_steps",
    "run_bench",
    "run_remote",
    "serve",
    "write_page",
]
