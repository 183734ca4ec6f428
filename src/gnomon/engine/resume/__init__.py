"""Generations that were interrupted: what had been generated is kept on disk, and the identical request goes on from there."""

from gnomon.engine.resume.claim import claim
from gnomon.engine.resume.key import request_key
from gnomon.engine.resume.record import Record, Unreadable
from gnomon.engine.resume.store import Slot, Store

__all__ = ["Record", "Slot", "Store", "Unreadable", "claim", "request_key"]
