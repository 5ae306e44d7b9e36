"""Where a simulated goodput says less than it seems to: sentences to print beside it. Pure."""

from __future__ import annotations

from ops.goodput.fleet import FailureModel, Fleet, Mode

#: Of fewer failures than these a run may well see none, and take that for certain.
_FEW = 5.0


def caveats(fleet: Fleet, model: FailureModel) -> list[str]:
    """Returns what to know before the goodput is believed; usually nothing."""
    found = (_few_events(fleet, model), _floor(fleet, model), _free_spares(fleet, model))
    return [each for each in found if each]


def _few_events(fleet: Fleet, model: FailureModel) -> str:
    expected = {"interruptions": fleet.chips / model.chip_mtbi_s * fleet.duration_s}
    if model.domain_mtbi_days is not None:
        expected["domain failures"] = fleet.islands / model.domain_islands * fleet.days / model.domain_mtbi_days
    if model.coordinator_mtbi_days is not None:
        expected["coordinator failures"] = fleet.days / model.coordinator_mtbi_days
    few = [f"{count:.2g} {what}" for what, count in expected.items() if count < _FEW]
    return f"with {' and '.join(few)} to be expected the intervals are too narrow; simulate more --days" if few else ""


def _floor(fleet: Fleet, model: FailureModel) -> str:
    """Every pause is followed by training up to the next check, however many interruptions there are."""
    alone = fleet.mode in (Mode.DECOUPLED, Mode.DILOCO)
    every_s = model.chip_mtbi_s / (fleet.chips_of(0) if alone else fleet.chips)
    if every_s >= model.check_s:
        return ""
    return (
        f"an interruption every {every_s:.2g} s of {'an island' if alone else 'the job'} is more often than "
        f"check_s = {model.check_s:g} s, and training up to a check counts: the goodput is an upper bound"
    )


def _free_spares(fleet: Fleet, model: FailureModel) -> str:
    """Of few slices the one under repair is so large a part that a restart on a spare is cheaper than going without."""
    without_s = model.scale_down_s + model.scale_up_s + model.repair_s / model.slices(fleet.chips)
    if fleet.mode is not Mode.DP or model.restart_s >= without_s:
        return ""
    return (
        f"dp restarts on spare slices that cost nothing here; elastic modes go without one of "
        f"{model.slices(fleet.chips)} slices for {model.repair_s:g} s instead: compare with --repair-s 0"
    )
