"""Decides every value once: flag, then GNOMON_* variable, then the model's generation_config, then built-in."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import os
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from gnomon.config.cache import CacheConfig
from gnomon.config.checkpoint import CheckpointConfig
from gnomon.config.distributed import DistributedConfig
from gnomon.config.engine import EngineConfig
from gnomon.config.fetch import FetchConfig
from gnomon.config.http import HTTPConfig
from gnomon.config.isolation import IsolationConfig
from gnomon.config.kernel import KernelConfig
from gnomon.config.kv import KvConfig
from gnomon.config.log import LogConfig, TraceConfig
from gnomon.config.model import ClientConfig, ModelConfig, Paths
from gnomon.config.pool import PoolConfig
from gnomon.config.sampling import SamplingDefaults
from gnomon.config.speculation import SpeculationConfig
from gnomon.options import ConfigError, Given, Setting, Take, TakeFlag, kind_of


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a value came from; `name` is the flag, the variable or the model."""

    kind: Literal["flag", "environment", "model", "default"]
    name: str = ""

    def __str__(self) -> str:
        return {"flag": self.name, "environment": self.name, "model": f"generation_config of {self.name}"}.get(
            self.kind, "built-in"
        )


@dataclass(frozen=True, slots=True)
class Config:
    """Everything resolved. `origins` is keyed `group.field`; `notes` are remarks worth a warning."""

    model: ModelConfig = field(default_factory=ModelConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    sampling: SamplingDefaults = field(default_factory=SamplingDefaults)
    http: HTTPConfig = field(default_factory=HTTPConfig)
    fetch: FetchConfig = field(default_factory=FetchConfig)
    isolation: IsolationConfig = field(default_factory=IsolationConfig)
    distributed: DistributedConfig = field(default_factory=DistributedConfig)
    pool: PoolConfig = field(default_factory=PoolConfig)
    client: ClientConfig = field(default_factory=ClientConfig)
    paths: Paths = field(default_factory=Paths)
    log: LogConfig = field(default_factory=LogConfig)
    kernel: KernelConfig = field(default_factory=KernelConfig)
    kv: KvConfig = field(default_factory=KvConfig)
    trace: TraceConfig = field(default_factory=TraceConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    origins: Mapping[str, Origin] = field(default_factory=dict[str, Origin])
    notes: tuple[str, ...] = ()

    def origin(self, group: str, name: str) -> Origin:
        return self.origins.get(f"{group}.{name}", Origin("default"))


Group = type[
    ModelConfig
    | EngineConfig
    | CacheConfig
    | SamplingDefaults
    | HTTPConfig
    | FetchConfig
    | IsolationConfig
    | DistributedConfig
    | PoolConfig
    | ClientConfig
    | Paths
    | LogConfig
    | KernelConfig
    | KvConfig
    | TraceConfig
    | CheckpointConfig
    | SpeculationConfig
]
GROUPS: Mapping[str, Group] = {
    "model": ModelConfig,
    "engine": EngineConfig,
    "cache": CacheConfig,
    "sampling": SamplingDefaults,
    "http": HTTPConfig,
    "fetch": FetchConfig,
    "isolation": IsolationConfig,
    "distributed": DistributedConfig,
    "pool": PoolConfig,
    "client": ClientConfig,
    "paths": Paths,
    "log": LogConfig,
    "kernel": KernelConfig,
    "kv": KvConfig,
    "trace": TraceConfig,
    "checkpoint": CheckpointConfig,
    "speculation": SpeculationConfig,
}
COMMON = (Paths, LogConfig)
"""Groups whose flags every verb takes."""
SERVE = (
    ModelConfig,
    EngineConfig,
    CacheConfig,
    SamplingDefaults,
    SpeculationConfig,
    HTTPConfig,
    FetchConfig,
    IsolationConfig,
    DistributedConfig,
    PoolConfig,
    KernelConfig,
    KvConfig,
    TraceConfig,
    CheckpointConfig,
    *COMMON,
)


def settings(groups: Iterable[Group] | None = None) -> Iterator[Setting]:
    """All options of these groups (default: of all), in the order of declaration."""
    wanted = set(groups) if groups is not None else None
    for name, group in GROUPS.items():
        if wanted is not None and group not in wanted:
            continue
        hints = typing.get_type_hints(group)
        for f in dataclasses.fields(group):
            if "option" in f.metadata:
                kind, choices = kind_of(hints[f.name])
                yield Setting(name, f.name, f.metadata["option"], f.default, kind, choices)


def add_arguments(parser: argparse.ArgumentParser, groups: Sequence[Group]) -> None:
    """Add the flags of `groups` to a parser. Values stay text until `resolve`, so that one place checks them."""
    if ModelConfig in groups:
        parser.add_argument("model.positional", nargs="?", metavar="MODEL", help="same as --model, which wins")
    titles = {name: parser.add_argument_group(name) for name, group in GROUPS.items() if group in groups}
    for s in settings(groups):
        names = [s.flag, *s.option.aliases]
        into, default = titles[s.group], s.show(s.default)
        text = f"{s.option.help} [{s.env}; {default}{f'; {s.option.range} {s.option.unit}'.rstrip() if s.option.range else ''}]".replace(
            "%", "%%"
        )
        if s.kind == "flag":
            into.add_argument(*names, dest=s.dest, action=TakeFlag, default=None, help=text)
            continue
        shown = {"int": "N", "float": "X", "path": "PATH", "switch": "on|off", "choice": "|".join(s.choices)}.get(
            s.kind, "TEXT"
        )
        into.add_argument(
            *names,
            dest=s.dest,
            action=Take,
            nargs=None if s.kind == "list" else "?",
            const="on" if s.kind == "switch" else None,
            default=None,
            help=text,
            metavar=s.option.metavar or ("X" if s.option.scale > 1 else shown),
        )


def resolve(args: argparse.Namespace | None = None, environ: Mapping[str, str] | None = None) -> Config:
    """Decide every value once. `args` comes from a parser with `add_arguments`; `environ` defaults to the process's.

    Raises ConfigError naming the flag or variable, the value and the range.
    """
    environ = dict(os.environ if environ is None else environ)
    given: dict[str, Any] = vars(args) if args is not None else {}
    values: dict[str, dict[str, Any]] = {name: {} for name in GROUPS}
    origins: dict[str, Origin] = {}
    for s in settings():
        found = _from_flag(s, given) or _from_environment(s, environ)
        if found is not None:
            values[s.group][s.name], origins[s.dest] = found
    if given.get("model.positional"):
        values["model"]["query"], origins["model.query"] = given["model.positional"], Origin("flag", "argument")
    built = {name: group(**values[name]) for name, group in GROUPS.items()}
    kernel = cast("KernelConfig", built["kernel"])
    if kernel.l1 and kernel.kernels in ("native", "int8"):
        raise ConfigError(
            str(origins["kernel.l1"]),
            f"excludes --kernels {kernel.kernels}: only stock operations equal mlx-lm to the bit",
        )
    kv = cast("KvConfig", built["kv"])
    if kernel.l1 and kv.l2:
        raise ConfigError(str(origins["kv.l2"]), "excludes --l1: one names mlx-optiq as the oracle, the other mlx-lm")
    try:
        _ = kv.scheme
    except ValueError as error:
        raise ConfigError(str(origins["kv.kv_quant"]), str(error)) from error
    notes = (
        *_speculation_notes(cast("SpeculationConfig", built["speculation"]), origins),
        *_http_notes(cast("HTTPConfig", built["http"]), origins),
        *_fetch_notes(cast("FetchConfig", built["fetch"]), origins),
        *_pool_notes(cast("PoolConfig", built["pool"]), origins),
        *_unknown_variables(environ),
    )
    speculation = cast("SpeculationConfig", built["speculation"])
    if speculation.strict and speculation.draft_model is not None:
        raise ConfigError(
            str(origins["speculation.fill"]),
            f"{speculation.fill} asserts tokens, which excludes --draft-model: take echo",
        )
    pool = cast("PoolConfig", built["pool"])
    if pool.model_pool is not None and speculation.draft_model is not None:
        raise ConfigError(
            str(origins["speculation.draft_model"]), "excludes --model-pool: a draft model fits one model's vocabulary"
        )
    if pool.model_pool is not None and len(pool.pins) > pool.model_pool:
        raise ConfigError(
            str(origins["pool.pins"]), f"{len(pool.pins)} models are more than --model-pool {pool.model_pool} holds"
        )
    return Config(**cast("dict[str, Any]", built), origins=origins, notes=notes)


def _speculation_notes(wanted: SpeculationConfig, origins: Mapping[str, Origin]) -> Iterator[str]:
    """Settings of proposers that have no effect. Raises ConfigError for those that exclude each other."""
    given = [origins[key] for key in ("speculation.ngram_max", "speculation.ngram_min") if key in origins]
    if wanted.ngram and wanted.ngram_min > wanted.ngram_max:
        name = str(given[-1]) if given else "--ngram-min"
        raise ConfigError(name, f"--ngram-min {wanted.ngram_min} is more than --ngram-max {wanted.ngram_max}")
    if wanted.draft_kind == "two-model" and wanted.draft_model is None:
        raise ConfigError(str(origins["speculation.draft_kind"]), "two-model needs --draft-model")
    if not wanted.ngram:
        yield from (f"{origin} has no effect without --draft-kind ngram" for origin in given)
    if not wanted.enabled and (origin := origins.get("speculation.num_draft_tokens")) is not None:
        yield f"{origin} has no effect without --draft-model or --draft-kind ngram"


def _http_notes(http: HTTPConfig, origins: Mapping[str, Origin]) -> Iterator[str]:
    if http.key_concurrency is not None and not http.api_keys and http.api_key_file is None:
        yield f"{origins['http.key_concurrency']} has no effect without --api-key or --api-key-file"


def _fetch_notes(fetch: FetchConfig, origins: Mapping[str, Origin]) -> Iterator[str]:
    if not fetch.fetch_urls:
        given = [origin for key, origin in origins.items() if key.startswith("fetch.") and key != "fetch.fetch_urls"]
        yield from (f"{origin} has no effect without --fetch-urls" for origin in given)


def _pool_notes(pool: PoolConfig, origins: Mapping[str, Origin]) -> Iterator[str]:
    if pool.model_pool is None:
        given = [origin for key, origin in origins.items() if key.startswith("pool.")]
        yield from (f"{origin} has no effect without --model-pool" for origin in given)


def _from_flag(s: Setting, given: Mapping[str, Any]) -> tuple[Any, Origin] | None:
    takes: list[Given] = [g for g in given.get(s.dest) or () if g.text is not None]
    if not takes:
        return None
    if s.kind == "list":
        return tuple(s.parse(g.flag, g.text or "") for g in takes), Origin("flag", s.flag)
    last = next((g for g in reversed(takes) if g.flag == s.flag), takes[-1])
    return s.parse(last.flag, last.text or ""), Origin("flag", last.flag)


def _from_environment(s: Setting, environ: Mapping[str, str]) -> tuple[Any, Origin] | None:
    name = next((n for n in (s.env, *s.option.env_aliases) if environ.get(n)), None)
    if name is None:
        return None
    text = environ[name]
    value = tuple(part.strip() for part in text.split(",") if part.strip()) if s.kind == "list" else s.parse(name, text)
    return value, Origin("environment", name)


def _unknown_variables(environ: Mapping[str, str]) -> Iterator[str]:
    known = {n for s in settings() for n in (s.env, *s.option.env_aliases)}
    for name in sorted(environ):
        if name.startswith("GNOMON_") and name not in known:
            # Compared without the shared prefix, which would make any two names alike.
            near = difflib.get_close_matches(name[7:], [k[7:] for k in known], 1)
            yield f"{name} is no variable of Gnomon and has no effect" + (
                f"; did you mean GNOMON_{near[0]}?" if near else ""
            )


def with_model_defaults(config: Config, generation_config: Mapping[str, Any], model: str) -> Config:
    """The config with what a model's generation_config.json says for sampling fields that no flag or variable set.

    Values out of range are left out and noted: a model's file must not stop the server. `do_sample: false` means greedy.
    """
    said = dict(generation_config)
    if said.get("do_sample") is False:
        said["temperature"] = 0.0
    taken: dict[str, Any] = {}
    notes: list[str] = []
    by_name = {s.name: s for s in settings([SamplingDefaults])}
    for name in ("temperature", "top_p", "top_k", "min_p"):
        if said.get(name) is None or getattr(config.sampling, name) is not None:
            continue
        try:
            taken[name] = by_name[name].parse(name, str(said[name]))
        except ConfigError as e:
            notes.append(f"generation_config of {model} ignored: {e}")
    if not taken and not notes:
        return config
    sampling = dataclasses.replace(config.sampling, **taken, from_model=config.sampling.from_model | set(taken))
    origins = {**config.origins, **{f"sampling.{name}": Origin("model", model) for name in taken}}
    return dataclasses.replace(config, sampling=sampling, origins=origins, notes=(*config.notes, *notes))
