"""Words for islands' agreement, and for the weight that follows from it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def fleet_line(figures: Mapping[str, Any]) -> str:
    """Returns the ``agreement`` and ``momentum_cosine`` among some figures; empty if neither is known."""
    agreement, momentum = figures.get("agreement"), figures.get("momentum_cosine")
    words = [] if agreement is None else [f"agreement {agreement:.2f}"]
    words += [] if momentum is None else [f"{momentum:.2f} of successive moves"]
    return ", ".join(words)


def weight_line(agreement: float | None, usual: float | None, trust: float) -> str:
    """Returns the weight of an island's tokens, and its agreement with the others if known."""
    weighs = f"weighs {trust:.0%} of its tokens' worth"
    return weighs if agreement is None or usual is None else f"agrees {agreement:.2f} of {usual:.2f} usual; {weighs}"
