"""Faults on purpose: real processes that move snapshots through proxies, and a seeded schedule that does its worst.

`frames` and `faults` know the frame header of the control channel and what can be done to frames, without a socket;
`proxy` puts them between two engines. `recipe` and `guard` say what every byte of a pool must be; `receiver` and
`sender` are the processes; `schedule` draws scenes from a seed; `scene` plays one and judges it; `run` plays many.
``python -m hurray_rdma.testing.chaos`` is the command, `scripts/chaos` its front door.

What is held true of every fault:

- a snapshot that is delivered is exact in every valid token, aliases and lengths included, until it is released;
- a page that is free does not change: not one byte lands after its release was reported;
- a send ends in time, in success or a `HurrayError`; an arrival ends in time, delivered or with a `HurrayError`;
- a send that succeeded was delivered, exactly once. A send that failed was delivered at most once: the acknowledgement
  may be what was lost. So one who sends again until it succeeds is heard at least once. An offer that the engine makes
  anew, since the session was lost before anything was written, may show as an arrival that failed before the other;
- afterwards the next sends succeed, and pages are free, leased or quarantined and nothing else; once every sender is
  gone all pages are free, and no process, socket, shared memory or file is left.
"""

from __future__ import annotations

from hurray_rdma.testing.chaos.faults import Action, Direction, FaultLine, Rule
from hurray_rdma.testing.chaos.frames import Frame, FrameCutter
from hurray_rdma.testing.chaos.proxy import ChaosProxy

__all__ = ["Action", "ChaosProxy", "Direction", "FaultLine", "Frame", "FrameCutter", "Rule"]
