"""Drawing the next tokens of a batch: processors, filters, HLG, keyed randomness, logprobs."""

from gnomon.engine.sampling.batch_sampler import BatchSampler, Drawn
from gnomon.engine.sampling.logprobs import Logprobs, Score
from gnomon.engine.sampling.randomness import fresh_seed
from gnomon.engine.sampling.row import RowSampling, check

__all__ = ["BatchSampler", "Drawn", "Logprobs", "RowSampling", "Score", "check", "fresh_seed"]
