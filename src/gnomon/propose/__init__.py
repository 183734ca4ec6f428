"""Proposers, how far each is to be trusted, and the policy that decides how much is guessed."""

from gnomon.propose.acceptance import Rates
from gnomon.propose.guesses import Guess, RowGuesses, Tally
from gnomon.propose.pace import Pace
from gnomon.propose.policy import Chance, Curve, best_depth, best_depths
from gnomon.propose.proposer import BatchProposer, Proposer, Text

__all__ = [
    "BatchProposer",
    "Chance",
    "Curve",
    "Guess",
    "Pace",
    "Proposer",
    "Rates",
    "RowGuesses",
    "Tally",
    "Text",
    "best_depth",
    "best_depths",
]
