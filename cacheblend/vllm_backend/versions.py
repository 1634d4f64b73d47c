"""Which vLLM releases this connector is for."""

from __future__ import annotations

import logging

from packaging.version import InvalidVersion, Version

from cacheblend.errors import BlendError

OLDEST = Version("0.25.0")
NEXT_UNTRIED = Version("0.34")
TESTED = tuple(map(Version, ("0.25.0", "0.27.1", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0")))
"""Releases that pass the gates: 0.25.0 on CUDA, the others on CPU."""

logger = logging.getLogger(__name__)


def require_version(version: str) -> None:
    """Refuse a release outside 0.25 to 0.33, and warn about one inside that the gates did not run on.

    Raises:
        BlendError: naming the release.
    """
    try:
        # A local label (+cpu, +cu130) names a build, not another release.
        release = Version(Version(version).public)
    except InvalidVersion:
        logger.warning("cacheblend: vLLM '%s' names no release; the gates ran on %s", version, _tested())
        return
    if not release >= OLDEST or release.release[:2] >= NEXT_UNTRIED.release[:2]:
        raise BlendError(f"vLLM {version} is not supported by the connector; install 0.25 to 0.33.")
    if release not in TESTED:
        logger.warning("cacheblend: vLLM %s is untested; the gates ran on %s", version, _tested())


def _tested() -> str:
    return ", ".join(map(str, TESTED))
