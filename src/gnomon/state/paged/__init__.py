"""Keys and values in pages that rows and the prefix cache share."""

from gnomon.state.paged.pool import PAGE, Hold, PagePool

__all__ = ["PAGE", "Hold", "PagePool"]
