"""Decisions as functions of numbers: quorum, pacing, staleness, outliers, quarantine. Pure."""
