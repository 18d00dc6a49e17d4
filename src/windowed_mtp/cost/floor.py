"""The least time that a machine with given rates needs for given work."""

from __future__ import annotations

from collections.abc import Iterable

from windowed_mtp.cost.families import GeometryError
from windowed_mtp.cost.record import Rates
from windowed_mtp.cost.work import Work


def floor_ms(work: Iterable[Work], rates: Rates) -> float:
    """Milliseconds below which no schedule gets: the larger of moving all bytes and of doing all operations.

    The two may overlap, so they are compared in sum and not part by part (the roofline of Williams, Waterman and
    Patterson, 2009, for the whole pass).

    Parameters
    ----------
    work : iterable of Work
        The parts of a pass, or of several.
    rates : Rates
        What the machine reached in measurements of their own.

    Raises
    ------
    GeometryError
        If a part's operands are of a type without a measured rate.
    """
    moved, computed = 0.0, 0.0
    for part in work:
        rate = rates.matrix_ops_per_s.get(part.operands)
        if rate is None:
            raise GeometryError(
                f"{part.part} multiply {part.operands} numbers, whose rate was not measured; measure it as well."
            )
        moved += part.bytes
        computed += part.ops / rate
    return 1e3 * max(moved / rates.copy_bytes_per_s, computed)
