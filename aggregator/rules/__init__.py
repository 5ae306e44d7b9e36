"""Decisions from numbers: quorum, pacing, staleness, outliers, quarantine. Pure."""
