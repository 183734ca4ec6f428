"""What goes wrong between Gnomon and where models come from."""

from __future__ import annotations


class HubError(RuntimeError):
    """A model can't be found, fetched or trusted. The message says what to do."""
