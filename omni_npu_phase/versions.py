# SPDX-License-Identifier: Apache-2.0
"""Versions of installed packages."""

from __future__ import annotations

from importlib import metadata


def version_of(package: str) -> str | None:
    """The version of an installed package, by its distribution's name; None where it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
