"""Every flag, variable, default and range, decided once: flag, then GNOMON_* variable, then the model's generation_config, then built-in.

The groups below are frozen dataclasses whose fields carry an `Option`; argparse arguments, environment reading, range checks and
`gnomon config` are all derived from them. Nothing else in Gnomon reads the environment.
"""
# ruff: noqa: RUF009  (`option` returns a dataclass field)

from __future__ import annotations

import argparse
import dataclasses
import difflib
import os
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

import platformdirs

from gnomon.engine.api import HLG, HLGPivot, SamplingParams
from gnomon.options import ConfigError, Given, Setting, Take, TakeFlag, kind_of, option

KiB, MiB, GiB = 1 << 10, 1 << 20, 1 << 30
GB = 10**9
BUILT_IN_TEMPERATURE = 0.7


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Which model: `--model`, else the positional argument, else `--query`, else one that is present, else the starter."""

    model: str | None = option(None, "model: a directory, a repository id, or part of the name of a model in the cache")
    query: str | None = option(None, "same as the argument MODEL, which wins", flag="--query", aliases=("-q",))

    @property
    def wanted(self) -> str | None:
        return self.model or self.query


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What the engine thread may do at once. Sizes are in tokens, rows, or bytes."""

    batch: int = option(
        8, "rows decoded at once; 1 is one request at a time", aliases=("--decode-concurrency",), low=1, high=1024
    )
    queue: int = option(64, "requests that may wait for a row; more are answered 429", low=1, high=1_000_000)
    prefill_chunk: int = option(
        2048,
        "prompt tokens per prefill step",
        low=1,
        high=1_000_000,
        unit="tokens",
        env_aliases=("GNOMON_RD_PREFILL_CHUNK",),
    )
    early_first_token: bool = option(True, "deliver the first token before the next step is built")
    pipeline: bool = option(True, "read tokens back one step behind whenever no row needs its token sooner")
    grammar: bool = option(True, "enforce structured output; off: only ask the model for it, with a warning")
    context_limit: int | None = option(
        None,
        "most tokens of prompt and answer together, below the model's own limit",
        low=1,
        high=1e9,
        unit="tokens",
        env_aliases=("GNOMON_RD_CONTEXT_LIMIT",),
    )
    memory_budget: int | None = option(
        None,
        "memory limit: work that can't fit is refused before it starts (unset: advice only)",
        low=0.05,
        high=1e6,
        unit="GB",
        scale=GB,
    )
    prompt_cache: int = option(
        8 * GiB,
        "memory for states of prompts and answers, so that none is computed twice; 0 is off, and no more than half of what "
        "the model's weights leave is taken",
        low=0,
        high=1e6,
        unit="GiB",
        scale=GiB,
    )
    checkpoint_every: int = option(
        4096,
        "prompt tokens between checkpoints of models whose state can't be cut (recurrent layers, sliding windows)",
        low=16,
        high=1e9,
        unit="tokens",
    )
    cache_retention: Literal["lru", "cost-size"] = option(
        "lru", "which states go first: those used longest ago, or those that save least work per byte"
    )
    stall_timeout: float = option(
        300.0, "the engine counts as stalled when its loop hasn't turned for so long", low=1, high=86_400, unit="s"
    )


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What a request that leaves a field out gets. None means that no flag, variable or model gave a value."""

    temperature: float | None = option(
        None, "sampling temperature; 0 is greedy (built-in 0.7)", aliases=("--temp",), low=0, high=5
    )
    top_p: float | None = option(None, "nucleus size; 0 is off (built-in 0)", low=0, high=1)
    top_k: int | None = option(None, "tokens kept; 0 is off (built-in 0)", low=0, high=1e6)
    min_p: float | None = option(None, "least probability relative to the best; 0 is off (built-in 0)", low=0, high=1)
    max_tokens: int | None = option(
        None, "most tokens of an answer that doesn't say (built-in: no cap)", low=1, high=1e7
    )
    thinking: bool | None = option(
        None, "thinking of models that can switch it: on or off (built-in: as the template does)"
    )
    hlg_sampling: bool = option(False, "tone-curve sampling (Lab) in place of temperature, top-p and top-k")
    hlg_width: float = option(4.0, "half width of the curve's straight part", low=0, high=100, unit="nats")
    hlg_shoulder: float = option(4.0, "roll-off above it", low=0, high=100, unit="nats")
    hlg_toe: float = option(6.0, "roll-off below it", low=0, high=100, unit="nats")
    hlg_pivot: HLGPivot = option("top", "what the curve is centred on")
    hlg_pivot_offset: float = option(6.0, "how far below the pivot the centre lies", low=0, high=100, unit="nats")
    from_model: frozenset[str] = frozenset()
    """Names of the fields that `with_model_defaults` took from the model."""

    def temperature_for(self, thinking: bool) -> float:
        """The temperature of a request that sets none: a model's own value is capped at 0.7 on turns that don't think."""
        if self.temperature is None:
            return BUILT_IN_TEMPERATURE
        if "temperature" in self.from_model and not thinking:
            return min(self.temperature, BUILT_IN_TEMPERATURE)
        return self.temperature

    def params(self, thinking: bool, seed: int | None = None) -> SamplingParams:
        """How a request that sets nothing itself is sampled."""
        return SamplingParams(
            temperature=self.temperature_for(thinking),
            top_p=self.top_p or 0.0,
            top_k=self.top_k or 0,
            min_p=self.min_p or 0.0,
            seed=seed,
            hlg=self.hlg if self.hlg_sampling else None,
        )

    @property
    def hlg(self) -> HLG:
        """The curve requests start from, whether or not `hlg_sampling` switches it on."""
        return HLG(self.hlg_width, self.hlg_shoulder, self.hlg_toe, self.hlg_pivot, self.hlg_pivot_offset)


@dataclass(frozen=True, slots=True)
class HTTPConfig:
    """Where the server listens and what it lets in. Limits are in bytes unless the name says otherwise."""

    host: str = option("127.0.0.1", "address to bind; others than loopback need --api-key")
    port: int = option(8080, "TCP port; 0 takes a free one", low=0, high=65_535)
    unix: Path | None = option(None, "listen on this unix socket in place of TCP", metavar="PATH")
    api_keys: tuple[str, ...] = option(
        (), "bearer key that clients must send; may be repeated", flag="--api-key", secret=True
    )
    allowed_hosts: tuple[str, ...] = option((), "further Host header accepted; may be repeated", flag="--allowed-host")
    allowed_origins: tuple[str, ...] = option(
        (), "further Origin accepted from browsers; may be repeated", flag="--allowed-origin"
    )
    body_limit: int = option(64 * MiB, "largest request body", low=0.001, high=16_384, unit="MiB", scale=MiB)
    header_limit: int = option(64 * KiB, "largest request head", low=1, high=1024, unit="KiB", scale=KiB)
    stable_prompts: bool = option(
        True, "move lines that known clients change with every request off the front of system prompts"
    )
    preparation_queue: int = option(64, "requests that may wait for rendering and tokenising", low=1, high=1_000_000)
    shutdown_timeout_ms: int = option(
        120_000, "how long open requests may finish after SIGTERM", low=0, high=86_400_000, unit="ms"
    )

    @property
    def shutdown_timeout(self) -> float:
        """In seconds."""
        return self.shutdown_timeout_ms / 1000


@dataclass(frozen=True, slots=True)
class ClientConfig:
    """How terminal verbs reach a running server."""

    server: str | None = option(None, "use the server at this URL in place of loading a model", metavar="URL")
    api_keys: tuple[str, ...] = option((), "bearer key sent to the server", flag="--api-key", secret=True)


@dataclass(frozen=True, slots=True)
class Paths:
    """Directories. Models downloaded from the hub stay in the hub's own cache."""

    cache: Path = option(
        Path(platformdirs.user_cache_dir("gnomon", appauthor=False)), "converted models and measurements", metavar="DIR"
    )

    @property
    def models(self) -> Path:
        return self.cache / "models"


@dataclass(frozen=True, slots=True)
class LogConfig:
    """Logging to stderr. Prompts and answers are logged only when asked for."""

    log_format: Literal["text", "json"] = option("text", "shape of log lines")
    log_level: Literal["debug", "info", "warning", "error"] = option("info", "least severity logged")
    log_prompts: bool = option(False, "the server logs prompts and answers too")


@dataclass(frozen=True, slots=True)
class KernelConfig:
    """Which implementation of an operation runs."""

    kernels: Literal["auto", "native", "stock"] = option(
        "auto", "auto: what won on this platform; native: our own CPU kernels; stock: MLX's own operations"
    )
    threads: int | None = option(None, "threads of the native CPU kernels; all fast cores, up to 16", low=1, high=1024)
    l1: bool = option(False, "equal to mlx-lm to the bit: stock operations only")

    @property
    def stock(self) -> bool:
        return self.l1 or self.kernels == "stock"


@dataclass(frozen=True, slots=True)
class TraceConfig:
    """Phase traces of requests."""

    p2r_trace: bool = option(False, "write the phases of every request to stderr as JSON lines")
    p2r_sync: bool = option(False, "wait for the device at the end of every traced phase; slows the engine")
    otlp_endpoint: str | None = option(
        None,
        "send the phases as OpenTelemetry spans to this OTLP collector (needs the extra otel)",
        env_aliases=("OTEL_EXPORTER_OTLP_ENDPOINT",),
        metavar="URL",
    )


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
    sampling: SamplingDefaults = field(default_factory=SamplingDefaults)
    http: HTTPConfig = field(default_factory=HTTPConfig)
    client: ClientConfig = field(default_factory=ClientConfig)
    paths: Paths = field(default_factory=Paths)
    log: LogConfig = field(default_factory=LogConfig)
    kernel: KernelConfig = field(default_factory=KernelConfig)
    trace: TraceConfig = field(default_factory=TraceConfig)
    origins: Mapping[str, Origin] = field(default_factory=dict[str, Origin])
    notes: tuple[str, ...] = ()

    def origin(self, group: str, name: str) -> Origin:
        return self.origins.get(f"{group}.{name}", Origin("default"))


Group = type[
    ModelConfig
    | EngineConfig
    | SamplingDefaults
    | HTTPConfig
    | ClientConfig
    | Paths
    | LogConfig
    | KernelConfig
    | TraceConfig
]
GROUPS: Mapping[str, Group] = {
    "model": ModelConfig,
    "engine": EngineConfig,
    "sampling": SamplingDefaults,
    "http": HTTPConfig,
    "client": ClientConfig,
    "paths": Paths,
    "log": LogConfig,
    "kernel": KernelConfig,
    "trace": TraceConfig,
}
COMMON = (Paths, LogConfig)
"""Groups whose flags every verb takes."""
SERVE = (ModelConfig, EngineConfig, SamplingDefaults, HTTPConfig, KernelConfig, TraceConfig, *COMMON)


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
    if kernel.l1 and kernel.kernels == "native":
        raise ConfigError(
            str(origins["kernel.l1"]), "excludes --kernels native: only stock operations equal mlx-lm to the bit"
        )
    return Config(**cast("dict[str, Any]", built), origins=origins, notes=tuple(_unknown_variables(environ)))


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
