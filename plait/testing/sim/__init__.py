"""A deterministic simulation of several processes. It runs Plait's code with simulated time, network, disks and clocks.

``Simulation`` runs the processes, ``Process`` is one of them, and ``Faults`` chooses the faults that hit them.
"""

from plait.testing.sim.faults import Fault, FaultKind, Faults, play
from plait.testing.sim.machine import SimClock
from plait.testing.sim.network import Network
from plait.testing.sim.process import Main, Process
from plait.testing.sim.sim_loop import SimLoop
from plait.testing.sim.simulation import Simulation
from plait.testing.sim.timeline import SimulationFailed

__all__ = [
    "Fault",
    "FaultKind",
    "Faults",
    "Main",
    "Network",
    "Process",
    "SimClock",
    "SimLoop",
    "Simulation",
    "SimulationFailed",
    "play",
]
