"""Virtual time: production cores behind modelled network, disk and fleet; faults and invariants."""
