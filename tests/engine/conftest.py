from engine_fixtures import engine
from gnomon.engine import disk

__all__ = ["engine"]

# What a test's engine has not written when it ends, the test's next one would miss: a slow disk is given its time.
disk.CLOSE_SECONDS = 300.0
