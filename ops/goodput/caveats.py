"""Where a simulated goodput says less than it seems to: sentences to print beside it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

from ops.goodput import renewal
from ops.goodput.availability import BATCHES
from ops.goodput.fleet import DAY_S, FailureModel, Fleet, Mode, all_slices

#: Of fewer failures than these a run may well see none, and take that for certain.
_FEW = 10.0

#: What is told to happen as rarely as this is meant never to happen.
_NEVER_YEARS = 1e6

#: By how much, as a share, slices may be larger or smaller than was asked for without a sentence.
_NEAR = 0.1

#: Of the goodput; less is not worth a sentence.
_NOTEWORTHY = 0.005


def caveats(fleet: Fleet, model: FailureModel, goodput: float) -> list[str]:
    """Returns what to know before the goodput is believed; usually nothing."""
    return [each for each in (*_of_intervals(fleet, model), *_of_the_model(fleet, model, goodput)) if each]


def caveats_of_all(runs: Sequence[tuple[str, Fleet, float]], model: FailureModel) -> list[str]:
    """Returns what to know of several fleets, as (name, fleet, goodput): what is said of many of them is said once."""
    of_each = [(*_of_intervals(fleet, model), *_of_the_model(fleet, model, goodput)) for _, fleet, goodput in runs]
    found = []
    for kind in zip(*of_each, strict=True):
        said = [(name, sentence) for (name, _, _), sentence in zip(runs, kind, strict=True) if sentence]
        if said:
            name, sentence = said[0]
            others = f", and {len(said) - 1} more alike" if len(said) > 1 else ""
            found.append(sentence if set(kind) == {sentence} else f"{name}{others}: {sentence}")
    return found


def assumed(fleet: Fleet, model: FailureModel, goodput: float) -> list[str]:
    """Returns what of the model itself is in the goodput, however long the fleet is simulated."""
    return [each for each in _of_the_model(fleet, model, goodput) if each]


def changed(model: FailureModel) -> str:
    """Says which settings are others than those that table 1 of the paper has or is fitted with; usually nothing."""
    usual = FailureModel()
    others = [(each.name, getattr(model, each.name), getattr(usual, each.name)) for each in fields(model)]
    told = [
        f"{name} = {value:g} ({'none' if known is None else f'{known:g}'})"
        for name, value, known in others
        if value != known
    ]
    return f"other settings than the published table has or is fitted with: {', '.join(told)}" if told else ""


def _of_intervals(fleet: Fleet, model: FailureModel) -> tuple[str, ...]:
    """Sentences in a fixed order, empty where there is nothing to say; so is the next."""
    return (
        _few_events(fleet, model),
        _long_repairs(fleet, model),
        _whole_at_first(fleet, model),
        _other_slices(fleet, model),
    )


def _of_the_model(fleet: Fleet, model: FailureModel, goodput: float) -> tuple[str, ...]:
    return (
        _floor(fleet, model),
        _long_steps(fleet, model),
        _free_spares(fleet, model),
        _whole_islands(fleet, model),
        _below_the_job(fleet, model, goodput),
        _speeds(fleet, model),
        _never(model),
    )


def _few_events(fleet: Fleet, model: FailureModel) -> str:
    expected = {}
    if model.mtbi_years < _NEVER_YEARS:
        expected["interruptions"] = fleet.chips / model.chip_mtbi_s * fleet.duration_s
    if model.domain_mtbi_days is not None:
        cycle_s = model.domain_mtbi_days * DAY_S + model.domain_repair_min * 60.0  # what is away does not fail
        expected["domain failures"] = fleet.islands / model.domain_islands * fleet.duration_s / cycle_s
    if model.coordinator_mtbi_days is not None:
        cycle_s = model.coordinator_mtbi_days * DAY_S + model.coordinator_repair_s
        expected["coordinator failures"] = fleet.duration_s / cycle_s
    few = [f"{count:.2g} {what}" for what, count in expected.items() if count < _FEW]
    return f"with {' and '.join(few)} to be expected the intervals are too narrow; simulate more --days" if few else ""


def _coordinator(fleet: Fleet, model: FailureModel) -> tuple[str, float]:
    """What of its repairs costs training, in words and seconds: decoupled islands go on without it for a while."""
    if fleet.mode is Mode.DECOUPLED:
        return "the coordinator beyond hold_s", max(0.0, model.coordinator_repair_s - model.hold_s)
    return "the coordinator", model.coordinator_repair_s


def _long_repairs(fleet: Fleet, model: FailureModel) -> str:
    """Batches in which the same slices are under repair are no independent ones."""
    repairs_s = {}
    if fleet.mode is not Mode.DP and model.mtbi_years < _NEVER_YEARS:
        repairs_s["slices"] = model.repair_s
    if model.domain_mtbi_days is not None:
        repairs_s["domains"] = model.domain_repair_min * 60.0
    if model.coordinator_mtbi_days is not None:
        what, repair_s = _coordinator(fleet, model)
        repairs_s[what] = repair_s
    batch_s = fleet.duration_s / BATCHES
    long = [what for what, repair_s in repairs_s.items() if repair_s > batch_s]
    if not long:
        return ""
    return (
        f"repairs of {' and '.join(long)} last longer than a {BATCHES}th of the simulated time, and intervals are made "
        "from such parts: they are too narrow; simulate more --days"
    )


def _whole_at_first(fleet: Fleet, model: FailureModel) -> str:
    """A fleet begins with nothing under repair: while the first repairs last it has more than it will have."""
    repairs = {}
    if fleet.mode is not Mode.DP:  # it has spare slices
        repairs["slices"] = model.repair_s, model.chip_mtbi_s / model.slice_chips
    if model.domain_mtbi_days is not None:
        repairs["domains"] = model.domain_repair_min * 60.0, model.domain_mtbi_days * DAY_S
    if model.coordinator_mtbi_days is not None:
        what, repair_s = _coordinator(fleet, model)
        repairs[what] = repair_s, model.coordinator_mtbi_days * DAY_S + model.coordinator_repair_s - repair_s
    all_wait = fleet.mode is Mode.DP or (fleet.mode is Mode.DILOCO and model.domains_of_island == 1)
    together = fleet.islands / model.domain_islands if all_wait else 1.0
    excess = {}
    for what, (repair_s, up_s) in repairs.items():
        length = repair_s / fleet.duration_s
        share = repair_s / (repair_s + up_s) * (length / 2 if length < 1 else 1 - 1 / (2 * length))
        excess[what] = share * (together if what == "domains" else 1.0)
    total = min(1.0, sum(excess.values()))
    if total < _NOTEWORTHY:
        return ""
    what = max(excess, key=lambda each: excess[each])
    return (
        f"nothing is under repair at first, and repairs of {what} take {repairs[what][0] / DAY_S:.2g} of "
        f"{fleet.days:g} days: goodput and interval are up to about {100 * total:.0f} points too high; simulate more "
        "--days"
    )


def _floor(fleet: Fleet, model: FailureModel) -> str:
    """Every pause is followed by training up to the next check, however many interruptions there are."""
    who, every_s = _interrupted(fleet, model)
    if every_s >= model.check_s:
        return ""
    return (
        f"an interruption every {every_s:.2g} s of {who} is more often than "
        f"check_s = {model.check_s:g} s, and training up to a check counts: the goodput is an upper bound"
    )


def _long_steps(fleet: Fleet, model: FailureModel) -> str:
    """Training up to a check counts, whatever part of a step that is."""
    who, every_s = _interrupted(fleet, model)
    lost = min(1.0, (model.step_s - model.check_s) / 2 / every_s)
    if lost < _NOTEWORTHY:
        return ""
    return (
        f"an interruption every {every_s:.3g} s of {who} cuts a step of {model.step_s:g} s short, and what was done of "
        f"it counts here: where it is lost, up to {lost:.1%} of the time is lost with it"
    )


def _interrupted(fleet: Fleet, model: FailureModel) -> tuple[str, float]:
    """Who pauses for an interruption, and how often there is one in seconds."""
    alone = fleet.mode in (Mode.DECOUPLED, Mode.DILOCO)
    return (
        ("an island", model.chip_mtbi_s / fleet.chips_of(0)) if alone else ("the job", model.chip_mtbi_s / fleet.chips)
    )


def _whole_islands(fleet: Fleet, model: FailureModel) -> str:
    """What has no slice left to go on with keeps everybody else waiting for its repair."""
    if fleet.mode is not Mode.DILOCO or fleet.islands == 1:
        return ""
    if model.domain_mtbi_days is not None and model.domains_of_island == 1:
        what, repair = "a domain", f"{model.domain_repair_min:g} min"
    elif model.slices(fleet.chips_of(0)) == 1 and model.mtbi_years < _NEVER_YEARS:
        what, repair = "the only slice of an island", f"{model.repair_s:g} s"
    else:
        return ""
    return (
        f"at a barrier everybody waits for {what} to be repaired ({repair}): a deployment that goes on without it, or "
        "has a spare, does better"
    )


def _below_the_job(fleet: Fleet, model: FailureModel, goodput: float) -> str:
    """Islands that meet at barriers pause one after another; a job takes what fails in a pause into the same one."""
    job = replace(fleet, mode=Mode.ELASTIC_DP)
    if fleet.mode is not Mode.DILOCO or not renewal.has_closed_form(job, model):
        return ""
    expected = renewal.goodput(job, model)
    if goodput > expected - _NOTEWORTHY:
        return ""
    return (
        f"one elastic-dp job on the same chips has {expected:.1%}: what fails during its pauses is part of them, where "
        "islands that meet at barriers pause one after another; such that settle their losses while they wait would do "
        "as well"
    )


def _other_slices(fleet: Fleet, model: FailureModel) -> str:
    """Islands have whole slices, of one size."""
    chips = fleet.chips_of(0)
    size = chips / model.slices(chips)
    if abs(size / model.slice_chips - 1.0) <= _NEAR or model.mtbi_years >= _NEVER_YEARS or fleet.mode is Mode.DP:
        return ""
    count = model.slices(chips)
    are = "is one slice" if count == 1 else f"has {count} slices"
    return f"an island of {chips:,} chips {are} of {size:,.0f} here, not of {model.slice_chips:,} (slice_chips)"


def _speeds(fleet: Fleet, model: FailureModel) -> str:
    usual = FailureModel()
    unequal = model.speed_spread > usual.speed_spread or model.step_jitter > usual.step_jitter
    if fleet.mode is not Mode.DECOUPLED or not unequal:
        return ""
    return (
        "speed_spread and step_jitter change nothing here: decoupled islands wait for nobody, and staleness is that of "
        "equal speeds"
    )


def _never(model: FailureModel) -> str:
    """Flags that say more of a failure that nobody asked for."""
    more = {
        "domain_mtbi_days": ("domain_islands", "domain_repair_min"),
        "coordinator_mtbi_days": ("coordinator_repair_s", "hold_s"),
    }
    usual = FailureModel()
    said = [
        f"{name} changes nothing without {switch}"
        for switch, names in more.items()
        if getattr(model, switch) is None
        for name in names
        if getattr(model, name) != getattr(usual, name)
    ]
    return ", ".join(said)


def _free_spares(fleet: Fleet, model: FailureModel) -> str:
    """Of few slices the one under repair is so large a part that a restart on a spare is cheaper than going without."""
    slices = all_slices(fleet, model)
    without_s = model.scale_down_s + model.scale_up_s + model.repair_s / slices
    if fleet.mode is not Mode.DP or model.restart_s >= without_s:
        return ""
    return (
        f"dp restarts on spare slices that cost nothing here; elastic modes go without one of "
        f"{slices} slices for {model.repair_s:g} s instead: compare with --repair-s 0"
    )
