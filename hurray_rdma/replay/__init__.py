"""The replay: a trace of real requests through real engines, prefill processes sending to decode processes.

This room reads traces, starts processes, and checks what comes out against counts of its own. It uses the library as
any application would; nothing imports it but the command line.

Bottom up: `trace`, `config`, `work` (what all processes know), `kept` (a prefix cache), `prefill` and `decode` (the
processes), `expected` (counts from the trace), `checks`, `gathered`, `run`; `results` is what `table` and `page` show.
"""

from hurray_rdma.replay.config import ReplayConfig, load_config
from hurray_rdma.replay.page import write_page
from hurray_rdma.replay.results import ReplayReport
from hurray_rdma.replay.run import NUM_STEPS, run_replay
from hurray_rdma.replay.table import print_report
from hurray_rdma.replay.trace import Trace, read_trace

__all__ = [
    "NUM_STEPS",
    "ReplayConfig",
    "ReplayReport",
    "Trace",
    "load_config",
    "print_report",
    "read_trace",
    "run_replay",
    "write_page",
]
