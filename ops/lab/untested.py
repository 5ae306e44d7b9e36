"""What was published and is put to no test here, with the reason, for the page of results. Data."""

from __future__ import annotations

from ops.lab.markdown import table
from ops.lab.results import Section

#: (what was published, where, why it is not tested, and what is known here instead)
CLAIMS = (
    (
        "Downstream scores, of text and of images",
        "Decoupled DiLoCo, Tables 2, 4, 5, 10, 11",
        "Models of a million parameters have none. Claims on them are tested by held-out loss instead",
    ),
    (
        "A mixture of experts with 2.8 B active parameters is on par with data-parallel training",
        "Decoupled DiLoCo, Table 3",
        "Size; figures not known. [parity-experts](#parity-experts) and [parity-experts-long](#parity-experts-long) "
        "have 0.35 M parameters",
    ),
    (
        "The gap closes with tokens: 2 B parameters, 26 B to 1.3 T tokens",
        "Decoupled DiLoCo, Table 12",
        "Size. [Gaps over tokens and size](#gaps-over-tokens-and-size) has slopes, of models a thousand times smaller",
    ),
    (
        "Parity at 2, 5 and 9 B parameters, relatively better with size",
        "Decoupled DiLoCo, Table 14",
        "Size. The same section",
    ),
    (
        "Sixteen islands are slightly worse, and make up for it with tokens",
        "Decoupled DiLoCo, Table 11",
        "Time on two processors: [parity-eight](#parity-eight) is as far as it goes",
    ),
    (
        "Balanced fragments cost nothing: 55.4 against 55.3 and 55.4 for layers and single tensors",
        "Decoupled DiLoCo, Table 7",
        "Only the balanced kind is built. [fragments](#fragments) has their number",
    ),
    (
        "Pseudo-gradients in 2 bits or 1 bit cost 32 % and 83 % of the loss",
        "Decoupled DiLoCo, Table 10",
        "No such codec is built, for that reason. [wire](#wire) has bf16, int8 and int4",
    ),
    (
        "Elastic data-parallel training gains less from extra chips than there are: relative times 1.00 to 0.80",
        "Decoupled DiLoCo, Table 4",
        "What its reconfiguration costs is not known; `simulate` has fleets that shrink, and none that grow",
    ),
    (
        "int4 brings the bandwidth to about a thousandth of data-parallel training's",
        "Decoupled DiLoCo, figure 13",
        "For which cell is not known; [Bandwidth](#bandwidth) has the pair that was published, 236 times apart",
    ),
    (
        "12 B parameters over four regions, more than 20 times faster than synchronous training on the same links",
        "Decoupled DiLoCo's announcement",
        "Islands, step times and tokens of that run are not known. [narrow](#narrow) is the same comparison in small",
    ),
    (
        "1.10 TB exchanged instead of 441 TB by 1 B parameters, H = 100",
        "Streaming DiLoCo, Dolma",
        "No run: 4 bits instead of 16, every 100 steps, are 400 times less, as published (401)",
    ),
    (
        "Global weights are better than those of a replica: 2.67 against 2.68 (mean of replicas) and 2.77 (one)",
        "Streaming DiLoCo",
        "Only global weights are ever judged here",
    ),
)


def section() -> Section:
    """Returns the section."""
    head = ("published", "where", "why not, and what there is instead")
    return Section(title="Published and not tested", body=lambda folder: table(head, CLAIMS))
