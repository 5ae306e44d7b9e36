"""The parts of docs/results.md that come from ``simulate`` and ``plan``: computed anew whenever the page is written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from broker.wire.messages import Codec
from ops.goodput import command as goodput
from ops.goodput.estimate import expected_goodput
from ops.goodput.fleet import FailureModel, Fleet, Mode
from ops.goodput.published import CHIPS, TABLE_1
from ops.lab import untested
from ops.lab.canvas import colour, drawing, legend, style_of, svg
from ops.lab.markdown import table
from ops.lab.results import Section
from ops.planning import bandwidth_table, links
from ops.planning.fleet import Fleet as PlannedFleet
from ops.planning.fleet import Site
from ops.planning.forecast import forecast
from ops.planning.planner import utilisation_curve

#: The published pair: eight sites, 5 B parameters, a step of one second, 95 % utilisation, int4.
_PAIR = PlannedFleet(
    parameters=5_000_000_000,
    sites=tuple(Site(name=f"site-{i}", step_s=1.0, tokens_per_step=1 << 18) for i in range(8)),
    codec=Codec.INT4,
    version_codec=Codec.INT4,
    sync_interval_steps=24,
    fragments=24,
    overlap_steps=2,
    utilisation=0.95,
    assume=links.Assume.PAPER,
)
_PUBLISHED_PAIR = {links.Mode.DP: 198.0, links.Mode.DECOUPLED: 0.84}

#: The one cell known of its table: a step of one second. It does not say for how many sites, which share of the time,
#: or how many bits; these give both figures.
_CELL = replace(_PAIR, sites=_PAIR.sites[:2], codec=Codec.INT8, version_codec=Codec.INT8, utilisation=0.9)
_PUBLISHED_CELL = {links.Mode.DP: 104.0, links.Mode.DECOUPLED: 1.7}


def sections() -> tuple[Section, ...]:
    """Returns the sections in the order of the page."""
    return (
        Section(
            title="Goodput under failures",
            body=_goodput,
            plots={"goodput.svg": _goodput_plot},
        ),
        Section(title="Bandwidth", body=_bandwidth, plots={"bandwidth.svg": _bandwidth_plot}),
        untested.section(),
    )


# --- simulate -----------------------------------------------------------------------------------------------------


def _goodput(folder: str) -> str:
    cells = goodput.table(Fleet(), FailureModel())
    rows = []
    for row in TABLE_1:
        mine = [cell for cell in cells if cell.row == row]
        goodputs = [(cell, cell.account.goodput) for cell in mine]
        shown = (
            f"{100 * g.low:.1f}-{100 * g.high:.1f} / {cell.published} ({cell.difference:+.1f})" for cell, g in goodputs
        )
        rows.append((row.name, *shown))
    worst = max(cells, key=lambda cell: abs(cell.difference))
    eight = [cell for cell in cells if cell.row.mode == Mode.DECOUPLED and cell.row.islands == 8]
    up = min(cell.account.uptime.value for cell in eight)
    mean = sum(abs(cell.difference) for cell in cells) / len(cells)
    head = (
        "goodput in %, ours (95 % interval) / published (points from the mean)",
        *(f">{chips:,} chips" for chips in CHIPS),
    )
    return f"""\
Decoupled DiLoCo, table 1, with one set of documented parameters (`simulate --help`), 30 simulated days, seed 0:
`python3 -m ops simulate --table`. [Plot]({folder}/goodput.svg).

{table(head, rows)}

The mean distance is {mean:.1f} points, the greatest {abs(worst.difference):.1f} ({worst.row.name}, {worst.chips:,}
chips). Five times are fitted to this table, since the paper does not print its own: to scale down and up, to restart,
how long a returned slice waits for a pause that happens anyway, and the period of checks; slices and repair are chosen.
So these cells test that one set of them fits all, not that it predicts others. Two cells of one and the same interval
between failures (elastic data-parallel at 1.2 M chips, two islands at 2.4 M) are published four points apart, so that
no model that knows intervals alone comes closer than two to both. With eight decoupled islands some island trains at
least {100 * up:.2f} % of the time in every cell; published is about 100 % for enough of them."""


def _goodput_plot() -> bytes:
    with drawing(1) as (figure, (axes,)):
        sizes = [50_000 * 2 ** (k / 2) for k in range(15)]
        series = [(Mode.DP, 8), (Mode.ELASTIC_DP, 8), *((Mode.DECOUPLED, islands) for islands in (2, 4, 8, 16))]
        for i, (mode, islands) in enumerate(series):
            name = f"decoupled, {islands} islands" if mode is Mode.DECOUPLED else str(mode)
            ys = [100 * expected_goodput(mode=mode, chips=round(chips), islands=islands) for chips in sizes]
            axes.plot(sizes, ys, color=colour(i), linestyle=style_of(i), label=name)
            for row, published in TABLE_1.items():
                if (row.mode, row.islands) == (mode, islands):
                    axes.plot(list(published), list(published.values()), "o", color=colour(i), markersize=4)
        axes.set(xscale="log", xlabel="chips, one interruption per chip and year", ylabel="goodput (%)", ylim=(0, 102))
        axes.set_title("Goodput by closed form; dots are published")
        legend(axes)
        return svg(figure)


# --- plan ---------------------------------------------------------------------------------------------------------


def _bandwidth(folder: str) -> str:
    pairs = [
        (f"{len(fleet.sites)} sites, {100 * fleet.utilisation:.0f} %, {bits}", *_side_by_side(fleet, published))
        for fleet, bits, published in ((_PAIR, "int4", _PUBLISHED_PAIR), (_CELL, "int8", _PUBLISHED_CELL))
    ]
    cells = bandwidth_table.recompute()
    rows = []
    for size, method in dict.fromkeys((cell.size, cell.method) for cell in cells):
        mine = [cell for cell in cells if (cell.size, cell.method) == (size, method)]
        rows.append((f"{size}, {method}", *(f"{cell.published_gbps:g} / {cell.gbps:.3g}" for cell in mine)))
    same = sum(cell.steps_apart == 0 for cell in cells)
    farthest = max(abs(cell.steps_apart) for cell in cells)
    whole = bandwidth_table.recompute(payload_share=1.0)
    head = ("Gbit/s, published / ours", *(f">{100 * u:.0f} %" for u in dict.fromkeys(c.utilisation for c in cells)))
    return f"""\
Eight data centres, 5 B parameters, one second per step, 95 % utilisation, int4 through a hub (f = 1) against a bf16
ring: `python3 -m ops plan --params 5e9 --sites 8 --step-time 1 --codec int4 --utilisation 0.95 --assume paper`. What
was published does not say what it counts; these assumptions are those that give both figures.
[Plot]({folder}/bandwidth.svg).

{table(("5 B parameters, 1 s per step", *(f">{what}" for what in _SIDES)), pairs)}

Ours are the next point of the grid, and in brackets what was rounded up to it. The second row is the one cell that is
known of the publication's own table, whose reductions reach from 60 to 242. Of its sites, share and bits nothing is
known but that these give it: `--sites 2 --codec int8 --utilisation 0.9`.

{_own_programs()}

Streaming DiLoCo's table of required bandwidth by utilisation: `python3 -m ops plan --table`.

{table(head, rows)}

{same} of {len(cells)} cells are the same, the others at most {farthest} step of the grid (a factor of 1.21) apart. A
bucket is a layer there, and a fragment three; the flags of `plan` know no layers and count the whole payload, so that
they come out a step or more higher. The
simulator's rules are the first author's; {100 * bandwidth_table.PAYLOAD_SHARE:.1f} % of the nominal payload is fitted,
and without that fit {sum(abs(cell.steps_apart) <= 1 for cell in whole)} of {len(whole)} cells are within one step. Real
runs are within 2 % of the plan's bytes: `python3 -m ops test tests/integration/test_plan_bytes.py`."""


def _own_programs() -> str:
    """What the first row's fleet needs when our own programs run it: their versions travel wider than int4."""
    told, up_gbps = [], 0.0
    for version_codec in (Codec.F32, Codec.BF16):
        fleet = replace(_PAIR, assume=links.Assume.ATOLL, version_codec=version_codec)
        dp, decoupled = (forecast(fleet, mode) for mode in (links.Mode.DP, links.Mode.DECOUPLED))
        up_gbps, ratio = decoupled.up_gbps, dp.exact_gbps / decoupled.exact_gbps
        told.append(f"{decoupled.down_gbps:.3g} Gbit/s as {version_codec}, {ratio:.0f} times less than data-parallel")
    return (
        f"Our own programs send a site's int4 pseudo-gradients up at {up_gbps:.3g} Gbit/s there, and versions, for "
        f"which int4 is too coarse, come down: {' training does, or '.join(told)}. `plan` without `--assume paper` "
        "says so."
    )


_SIDES = ("dp, published Gbit/s", "ours", "decoupled, published Gbit/s", "ours", "ratio, published", "ours")


def _side_by_side(fleet: PlannedFleet, published: Mapping[links.Mode, float]) -> tuple[str, ...]:
    """Returns the figures under :data:`_SIDES`."""
    ours = {mode: forecast(fleet, mode) for mode in published}
    dp, decoupled = links.Mode.DP, links.Mode.DECOUPLED
    figures = [
        figure
        for mode in (dp, decoupled)
        for figure in (f"{published[mode]:g}", f"{ours[mode].up_gbps:.3g} ({ours[mode].exact_gbps:.4g})")
    ]
    ratio = ours[dp].exact_gbps / ours[decoupled].exact_gbps
    return (*figures, f"{published[dp] / published[decoupled]:.0f}", f"{ratio:.0f}")


def _bandwidth_plot() -> bytes:
    with drawing(1) as (figure, (axes,)):
        curves = utilisation_curve(_PAIR, [0.05 + 0.94 * k / 20 for k in range(21)])
        for i, mode in enumerate(links.Mode):
            axes.plot(
                100 * curves["utilisation"], curves[str(mode)], color=colour(i), linestyle=style_of(i), label=mode
            )
        for mode, published in _PUBLISHED_PAIR.items():
            axes.plot([95], [published], "o", color=colour(list(links.Mode).index(mode)), markersize=5)
        axes.set(yscale="log", xlabel="compute utilisation (%)", ylabel="Gbit/s per site", ylim=(0.1, 1000))
        axes.set_title("8 sites, 5 B parameters, 1 s per step, int4; dots are published")
        legend(axes)
        return svg(figure)
