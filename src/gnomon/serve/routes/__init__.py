"""One file per endpoint; each has a `router`."""
