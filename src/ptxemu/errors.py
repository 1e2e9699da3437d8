"""What the emulator reports. Every fault is an `EmulatorError`; the class says of what kind."""

from __future__ import annotations


class EmulatorError(Exception):
    """A fault of the kernel, or of how the emulator is used. `line` is the PTX line, 0 where there is none."""

    line: int = 0


class MemoryFault(EmulatorError):
    """An access outside its memory, misaligned, or to bytes that were never written."""


class RaceFault(EmulatorError):
    """Two accesses that nothing orders."""


class ProxyFault(EmulatorError):
    """An access of the asynchronous proxy without a fence after the generic write that it reads."""


class BarrierFault(EmulatorError):
    """A barrier that is used against its rules: counts, phases, transaction bytes, numbers."""


class Deadlock(EmulatorError):
    """Every warp waits."""


class WgmmaFault(EmulatorError):
    """Registers of a wgmma touched while it is in flight, or a missing fence, commit or wait."""


class TensorFault(EmulatorError):
    """Tensor memory that is not allocated, not freed, or used against the rules of tcgen05."""


class Unsupported(EmulatorError):
    """An instruction, modifier or directive that the emulator does not have."""


BY_NUMBER = (
    None, MemoryFault, RaceFault, ProxyFault, BarrierFault, Deadlock, WgmmaFault, TensorFault, Unsupported, EmulatorError,
)  # fmt: skip
"""Classes by the core's error numbers."""
