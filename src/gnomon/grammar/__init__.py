"""Grammars over a model's tokens, by llguidance: compiled once, matched row by row, on the host."""

from gnomon.grammar.compiler import Compiled, Compiler, Unenforceable
from gnomon.grammar.matcher import GrammarFailed, Matcher, Words
from gnomon.grammar.vocabulary import Vocabulary

__all__ = ["Compiled", "Compiler", "GrammarFailed", "Matcher", "Unenforceable", "Vocabulary", "Words"]
