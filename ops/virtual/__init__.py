"""Virtual time: the production cores behind a modelled network, disk and fleet, with faults and invariants."""
