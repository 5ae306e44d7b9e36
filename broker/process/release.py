"""The version of the installed package."""

from __future__ import annotations

from importlib import metadata


def release() -> str:
    """Returns the version of the installed package; empty in a checkout, which has none."""
    try:
        return metadata.version("atoll")
    except metadata.PackageNotFoundError:
        return ""
