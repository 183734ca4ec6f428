"""Every flag, variable, default and range, decided once: flag, then GNOMON_* variable, then the model's generation_config, then built-in.

One file per group of settings: frozen dataclasses whose fields carry an `Option`. argparse arguments, environment reading, range
checks and `gnomon config` are all derived from them. Nothing else in Gnomon reads the environment.
"""

from gnomon.config.cache import CacheConfig
from gnomon.config.checkpoint import CheckpointConfig
from gnomon.config.distributed import DistributedConfig
from gnomon.config.engine import EngineConfig
from gnomon.config.fetch import FetchConfig
from gnomon.config.http import HTTPConfig
from gnomon.config.isolation import IsolationConfig
from gnomon.config.kernel import KernelConfig
from gnomon.config.kv import KvConfig, KvScheme
from gnomon.config.log import LogConfig, TraceConfig
from gnomon.config.model import ClientConfig, ModelConfig, Paths
from gnomon.config.pool import PoolConfig
from gnomon.config.resolve import (
    COMMON,
    GROUPS,
    SERVE,
    Config,
    Group,
    Origin,
    add_arguments,
    resolve,
    settings,
    with_model_defaults,
)
from gnomon.config.sampling import SamplingDefaults
from gnomon.config.speculation import SpeculationConfig
from gnomon.config.units import GB, GiB, KiB, MiB
from gnomon.options import ConfigError

__all__ = [
    "COMMON",
    "GB",
    "GROUPS",
    "SERVE",
    "CacheConfig",
    "CheckpointConfig",
    "ClientConfig",
    "Config",
    "ConfigError",
    "DistributedConfig",
    "EngineConfig",
    "FetchConfig",
    "GiB",
    "Group",
    "HTTPConfig",
    "IsolationConfig",
    "KernelConfig",
    "KiB",
    "KvConfig",
    "KvScheme",
    "LogConfig",
    "MiB",
    "ModelConfig",
    "Origin",
    "Paths",
    "PoolConfig",
    "SamplingDefaults",
    "SpeculationConfig",
    "TraceConfig",
    "add_arguments",
    "resolve",
    "settings",
    "with_model_defaults",
]
