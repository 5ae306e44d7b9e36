"""What the defaults rest on: which comparisons count, and what the page says of them."""

from dataclasses import replace

import pytest

from aggregator.config import AggregatorConfig
from ops.lab.chapter import findings_of
from ops.lab.claims import comparison_of
from ops.lab.defaults import CHOSEN, default_of, sections, trials
from tests.synthetic import FakeExperiment, record

DEFAULTS = {name: default_of(name) for name in CHOSEN}


def run(rule, loss, *, seed=0, mode="decoupled", **settings):
    named = record(loss, seed=seed, experiment="outer", rule=rule)
    return replace(named, settings={"mode": mode, "seed": seed, "steps": 768, **DEFAULTS, **settings})


def claim(candidate, baseline, kind="not-worse"):
    return comparison_of(
        {
            "claim": f"{candidate} against {baseline}",
            "candidate": {"rule": candidate},
            "baseline": {"rule": baseline},
            "margin": 0.01,
            "kind": kind,
        }
    )


def found_in(records, *comparisons):
    return [findings_of(FakeExperiment(name="outer", comparisons=comparisons), records)]


def seeds(rule, base, **settings):
    return [run(rule, base + 0.001 * seed * seed, seed=seed, **settings) for seed in range(3)]


def test_defaults_are_those_of_production():
    assert default_of("outer_momentum") == AggregatorConfig().outer_momentum
    assert default_of("grace_factor") == AggregatorConfig().grace_factor


def test_a_comparison_counts_if_both_sides_differ_in_defaults_alone_and_the_candidate_has_them():
    records = [
        *seeds("default", 3.0),
        *seeds("momentum", 3.03, outer_momentum=0.9),
        *seeds("both", 3.06, outer_momentum=0.9, keep=0.0),
        *seeds("longer", 2.9, outer_momentum=0.9, steps=1536),
        *seeds("younger", 3.0, outer_momentum=0.9, outer_adaptation=0.5),  # which others leave out
        *seeds("lockstep", 3.0, mode="diloco", outer_momentum=0.9),
    ]
    others = ("momentum", "both", "longer", "younger", "lockstep")
    found = trials(found_in(records, *(claim("default", other) for other in others), claim("both", "default")))
    assert [(trial.names, trial.instead) for trial in found] == [
        (("outer_momentum",), "0.9"),
        (("outer_momentum", "keep"), "0.9, 0"),
    ]


def test_what_was_tuned_for_each_side_may_differ_and_nothing_else_of_the_task():
    tuned = "task.learning_rate"  # as the experiment of these tests has it
    records = [
        *seeds("default", 3.0, **{tuned: 0.004}),
        *seeds("momentum", 2.9, outer_momentum=0.9, **{tuned: 0.002}),
        *seeds("batch", 2.9, outer_momentum=0.9, **{tuned: 0.002, "task.batch": 32}),
    ]
    found = trials(found_in(records, claim("default", "momentum"), claim("default", "batch")))
    assert [(trial.names, trial.instead) for trial in found] == [(("outer_momentum",), "0.9")]


def test_muon_has_defaults_of_its_own_and_the_page_tells_them_apart():
    muon = {"task.optimizer": "muon"}
    suited = {"merge": "mean", "outer_learning_rate": 0.7, "outer_momentum": 0.5}
    records = [
        *seeds("of adamw", 3.0),
        *seeds("adamw otherwise", 3.03, **suited),
        *seeds("of muon", 2.9, **muon, **suited),
        *seeds("muon otherwise", 2.93, **muon),
    ]
    pairs = (("of adamw", "adamw otherwise"), ("of muon", "muon otherwise"), ("muon otherwise", "of muon"))
    experiments = found_in(records, *(claim(*pair) for pair in pairs))
    assert [(trial.default, trial.instead) for trial in trials(experiments)] == [
        ("1, 0, rda", "0.7, 0.5, mean"),
        ("0.7, 0.5, mean with muon", "1, 0, rda"),
    ]
    (section,) = sections(experiments)
    assert section.body({}).count("| `outer_learning_rate`, `outer_momentum`, `merge` |") == 2


def test_the_page_says_by_how_much_the_default_is_behind_at_worst():
    records = [
        *seeds("default", 3.0),
        *seeds("a little", 2.997, outer_momentum=0.1),
        *seeds("much", 3.3, outer_momentum=0.9),
    ]
    (section,) = sections(found_in(records, claim("default", "a little"), claim("default", "much")))
    text = section.body("results")
    assert "is more than 0.10 % behind, and\nno interval reaches beyond +0.10 %." in text
    assert "Behind for the whole interval: `outer_momentum` (+0.10 % ± 0.00 % against 0.1)." in text
    row = next(line for line in text.splitlines() if line.startswith("| `outer_momentum` |"))
    assert "| 0 | 0.1; 0.9 | +0.10 %" in row
    assert "2 holds | [outer](#outer) |" in row


@pytest.mark.parametrize("records", [[], seeds("default", 3.0)])
def test_without_comparisons_there_is_no_section(records):
    assert sections(found_in(records, claim("default", "much"))) == ()
