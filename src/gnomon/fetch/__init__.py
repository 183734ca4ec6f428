"""Reading what a client names by URL, without being a way into the networks that this machine can reach."""

from gnomon.fetch.addresses import not_public, own_networks
from gnomon.fetch.fetcher import Document, Fetcher, FetchError, Limits
from gnomon.fetch.pinned import PinnedBackend

__all__ = ["Document", "FetchError", "Fetcher", "Limits", "PinnedBackend", "not_public", "own_networks"]
