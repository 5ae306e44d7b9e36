"""Figures of the paper that commands print beside their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

CHIPS = (150_000, 300_000, 600_000, 1_200_000, 2_400_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A row of table 1.

    Attributes:
        mode: As ``atoll simulate --mode`` has it.
        islands: Learners; for a synchronous job its groups, whose number the paper does not say and that hardly counts.
    """

    name: str
    mode: str
    islands: int


#: Decoupled DiLoCo (https://arxiv.org/abs/2604.21428), table 1: goodput in percent, by chips. One interruption per
#: chip and year.
TABLE_1: Mapping[Row, Mapping[int, int]] = {
    Row(name="DP, not elastic", mode="dp", islands=8): dict(zip(CHIPS, (72, 57, 38, 27, 18), strict=True)),
    Row(name="elastic DP", mode="elastic-dp", islands=8): dict(zip(CHIPS, (88, 80, 69, 58, 40), strict=True)),
    Row(name="decoupled, 2 islands", mode="decoupled", islands=2): dict(zip(CHIPS, (94, 88, 80, 70, 54), strict=True)),
    Row(name="decoupled, 8 islands", mode="decoupled", islands=8): dict(zip(CHIPS, (98, 96, 94, 88, 80), strict=True)),
}
