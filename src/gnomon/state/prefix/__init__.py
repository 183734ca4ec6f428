"""States of token prefixes, kept so that no prefix is computed twice."""

from gnomon.state.prefix.block import BLOCK
from gnomon.state.prefix.cache import PrefixCache
from gnomon.state.prefix.explain import Kind, Miss
from gnomon.state.prefix.lending import Adopted, Lent
from gnomon.state.prefix.retention import Policy
from gnomon.state.prefix.sessions import Sessions

__all__ = ["BLOCK", "Adopted", "Kind", "Lent", "Miss", "Policy", "PrefixCache", "Sessions"]
