"""What the server fetches from elsewhere for its clients."""

from __future__ import annotations

from dataclasses import dataclass

from gnomon.config.units import MiB
from gnomon.options import option


@dataclass(frozen=True, slots=True)
class FetchConfig:
    """Documents by URL. Sizes are in bytes, times in seconds."""

    fetch_urls: bool = option(
        False, "fetch text documents that requests name by http or https URL, from public addresses only"
    )
    allow_private_media: bool = option(
        False,
        "fetch them from private networks, this machine and any port, too: whoever may ask can then read what it can reach",
    )
    fetch_limit: int = option(4 * MiB, "largest document fetched", low=0.001, high=1024, unit="MiB", scale=MiB)
    fetch_timeout: float = option(
        10.0, "how long a document may take, redirects and names included", low=0.1, high=600, unit="s"
    )
