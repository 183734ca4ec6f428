"""What foretold text is worth: the same requests with it and without, in interleaved pairs, on whatever device MLX runs.

    uv run python benchmarks/fill.py MODEL [--out FOLDER] [--kernels native] [--batch 1 8] [--pairs 5] [--cells 'json*'] [--minutes N]

A cell is a case, a batch and a pair; several processes may share them (benchmarks/cells.py). A table of all that is there ends each run.
Both arms run in one process, and who goes first alternates. Ratios are without over with: of seconds from the first token
to the last, and of the process's CPU seconds, which a busy machine disturbs less.
"""

from __future__ import annotations

import argparse
import statistics
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from call_cases import NOTATIONS, free_calls, strict_call
from cells import Cell, add_arguments, results, run
from gnomon.chat.constraint import Constraint, json_schema
from gnomon.chat.spans import ToolSpans
from gnomon.chat.tokenizer import Tokenizer
from gnomon.config import EngineConfig, KernelConfig, SpeculationConfig, resolve
from gnomon.engine.api import Finished, Request, SamplingParams
from gnomon.engine.engine import Engine, load
from gnomon.engine.settings import Settings

CLOSED = {"additionalProperties": False}
STRING, NUMBER = {"type": "string", "maxLength": 16}, {"type": "integer", "minimum": 0, "maximum": 9999}
ITEM = {
    "type": "object",
    "properties": {"product_name": STRING, "unit_price": NUMBER, "quantity": NUMBER, "in_stock": {"type": "boolean"}},
    "required": ["product_name", "unit_price", "quantity", "in_stock"],
    **CLOSED,
}
DENSE = {
    "type": "object",
    "properties": {
        "customer_name": STRING,
        "customer_number": NUMBER,
        "shipping_address": {
            "type": "object",
            "properties": {
                "street": STRING,
                "postal_code": NUMBER,
                "city": STRING,
                "country_code": {"enum": ["DE", "FR", "GB"]},
            },
            "required": ["street", "postal_code", "city", "country_code"],
            **CLOSED,
        },
        "line_items": {"type": "array", "items": ITEM, "minItems": 3, "maxItems": 3},
    },
    "required": ["customer_name", "customer_number", "shipping_address", "line_items"],
    **CLOSED,
}
LOOSE = {"type": "object", "properties": {"text": {"type": "string", "maxLength": 400}}, "required": ["text"], **CLOSED}
CALLS = {
    "type": "object",
    "properties": {
        "name": {"const": "get_current_weather"},
        "arguments": {
            "type": "object",
            "properties": {
                "city": STRING,
                "unit": {"enum": ["celsius", "fahrenheit"]},
                "days": {"type": "integer", "maximum": 9},
            },
            "required": ["city", "unit", "days"],
            **CLOSED,
        },
    },
    "required": ["name", "arguments"],
    **CLOSED,
}
CODE = "\n".join(
    f"    def set_{name}(self, value: float) -> None:\n        self.check_range(value, 0.0, 100.0)\n        self._{name} = value\n"
    for name in ("width", "height", "depth", "angle")
)


GREEDY = SamplingParams()


Made = tuple[Sequence[str], Constraint | None, ToolSpans | None]
"""Whole prompts, row by row, and what their answers are bound by or may be asserted of."""


@dataclass(frozen=True)
class Case:
    """`made` takes the place of prompt and constraint where they depend on the tokenizer."""

    prompt: str
    fill: SpeculationConfig
    constraint: Constraint | None = None
    tokens: int = 220
    sampling: SamplingParams = GREEDY
    made: Callable[[Tokenizer], Made] | None = None


def chat(prompt: str) -> str:
    return f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"


ORDER = "Please deliver three garden tools to customer 4711 on Tuesday."
GRAMMAR, STRICT = SpeculationConfig(), SpeculationConfig(fill="strict", fill_max_span=64)
CASES = {
    "json": Case("Write an order of three garden tools as JSON.", GRAMMAR, json_schema(DENSE)),
    "json-sampled": Case(
        "Write an order of three garden tools as JSON.",
        GRAMMAR,
        json_schema(DENSE),
        sampling=SamplingParams(temperature=0.8, seed=1),
    ),
    "call": Case("What will the weather be in Oslo in the next three days?", GRAMMAR, json_schema(CALLS)),
    "text-in-json": Case("Tell me about the sea, as JSON.", GRAMMAR, json_schema(LOOSE)),
    "echo-code": Case(f"Repeat this code exactly:\n\n{CODE}\n", SpeculationConfig(fill="echo"), tokens=160),
    "echo-prose": Case("Tell me about the sea.", SpeculationConfig(fill="echo"), tokens=160),
    **{
        f"strict-{notation}": Case(
            ORDER, GRAMMAR, made=lambda t, n=notation: ((chat(ORDER),), strict_call(n, t), None), tokens=200
        )
        for notation in NOTATIONS
    },
    "strict-any-json": Case(
        ORDER, GRAMMAR, made=lambda t: ((chat(ORDER),), strict_call("json", t, named=False), None), tokens=200
    ),
    "asserted-calls": Case("", STRICT, made=lambda t: (free_calls(t)[0], None, free_calls(t)[1]), tokens=100),
    "asserted-none": Case(
        "", STRICT, made=lambda t: (free_calls(t, calls=False)[0], None, free_calls(t, calls=False)[1]), tokens=100
    ),
}
"""`strict-`: a strict tool that is demanded. `asserted-`: `--fill strict`, with calls and without."""


def answer(engine: Engine, case: Case, batch: int, first: int = 0) -> dict[str, Any]:
    """All rows at once, from this prompt on: seconds from the first first token to the last end, tokens, forwards and ids."""
    prompts, constraint, spans = (
        ((chat(case.prompt),), case.constraint, None) if case.made is None else case.made(engine.tokenizer)
    )
    requests = [
        Request(
            f"r{uuid.uuid4().hex}",
            tuple(engine.tokenizer.encode(prompts[(first + i) % len(prompts)])),
            case.sampling if case.sampling.seed is None else SamplingParams(temperature=0.8, seed=i + 1),
            case.tokens,
            constraint=constraint,
            spans=spans,
        )
        for i in range(batch)
    ]
    streams = [engine.stream(each) for each in requests]
    begun, used = time.perf_counter(), time.process_time()
    ids: list[list[int]] = []
    usages: list[Any] = []
    for stream in streams:
        own: list[int] = []
        for event in stream:
            own += getattr(event, "ids", ())
            if isinstance(event, Finished):
                usages.append(event.usage)
        ids.append(own)
    seconds = time.perf_counter() - begun - min(usage.prefill_seconds for usage in usages)
    fills = [usage.fill for usage in usages if usage.fill is not None]
    return {
        "seconds": seconds,
        "cpu": time.process_time() - used,
        "tokens": sum(usage.completion_tokens for usage in usages),
        "steps": sum(usage.speculation.target_calls for usage in usages if usage.speculation is not None),
        "drafted": sum(fill.verify_drafted + fill.strict for fill in fills),
        "filled": sum(fill.strict + fill.echo + fill.grammar for fill in fills),
        "spans": sum(len(fill.spans) for fill in fills),
        "without_spans": sum(not fill.spans for fill in fills),
        "unreadable": sum(fill.parse_fallback for fill in fills),
        "ids": ids,
    }


class Engines:
    """Both arms of the case that was asked for last, warm."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.fill: SpeculationConfig | None = None
        self.warm: set[str] = set()
        self.arms: dict[str, Engine] = {}

    def of(self, name: str) -> dict[str, Engine]:
        fill = CASES[name].fill
        if fill != self.fill:
            self.stop()
            kernels = KernelConfig(kernels=self.args.kernels)
            if self.args.kernel_cache:
                kernels = replace(kernels, kernel_cache=self.args.kernel_cache)
            base = Settings(
                engine=EngineConfig(batch=max(self.args.batch), prompt_cache=0),
                kernels=kernels,
                measurements=resolve().paths.cache,
            )
            arms = {"without": SpeculationConfig(grammar_jump=False), "with": fill}
            self.arms = {arm: load(self.args.model, replace(base, speculation=how)) for arm, how in arms.items()}
            self.fill, self.warm = fill, set()
        if name not in self.warm:
            self.warm.add(name)
            for engine in self.arms.values():
                for rows in sorted({1, *self.args.batch}):
                    answer(engine, replace(CASES[name], tokens=min(CASES[name].tokens, 32)), rows)
        return self.arms

    def stop(self) -> None:
        for engine in self.arms.values():
            engine.stop()

    def cell(self, name: str, batch: int, pair: int) -> dict[str, Any]:
        engines, order = self.of(name), ("without", "with") if pair % 2 == 0 else ("with", "without")
        made = {arm: answer(engines[arm], CASES[name], batch, pair) for arm in order}
        same = made["with"].pop("ids") == made["without"].pop("ids")
        about = {"case": name, "batch": batch, "pair": pair, "kernels": self.args.kernels, "same": same}
        return {**about, **made}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--kernels", default="native")
    parser.add_argument("--kernel-cache", type=Path)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--pairs", type=int, default=5)
    add_arguments(parser, "fill")
    args = parser.parse_args()
    engines = Engines(args)
    # All pairs of a case in a row: its engines are loaded once.
    work = [
        Cell(f"{name} {args.kernels} batch {batch} pair {pair}", partial(engines.cell, name, batch, pair))
        for batch in args.batch
        for name in CASES
        for pair in range(args.pairs)
    ]
    try:
        run(work, args)
    finally:
        engines.stop()
    if not args.list:
        print(table([one for one in results(args.out) if "error" not in one]))


def table(cells: Sequence[dict[str, Any]]) -> str:
    lines = [
        "| Case | Kernels | Batch | Pairs | Time: median (range) | CPU time | Tokens per forward | Taken of proposed | Asserted spans "
        "| Same tokens |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for key in dict.fromkeys((cell["case"], cell["batch"], cell["kernels"]) for cell in cells):
        own = [cell for cell in cells if (cell["case"], cell["batch"], cell["kernels"]) == key]
        wall, cpu = (_ratios(own, measure) for measure in ("seconds", "cpu"))
        last = own[-1]["with"]
        per = last["tokens"] / last["steps"] if last["steps"] else 1.0
        lines.append(
            f"| {key[0]} | {key[2]} | {key[1]} | {len(own)} | {wall} | {cpu} | {per:.2f} "
            f"| {last['filled']} of {last['drafted']} | {last.get('spans', 0)} | {sum(cell['same'] for cell in own)} of {len(own)} |"
        )
    return "\n".join(lines)


def _ratios(cells: Sequence[dict[str, Any]], measure: str) -> str:
    """Without over with, per token: median and range."""
    each = [
        (c["without"][measure] / c["without"]["tokens"]) / (c["with"][measure] / c["with"]["tokens"]) for c in cells
    ]
    return f"{statistics.median(each):.2f} ({min(each):.2f} to {max(each):.2f})"


if __name__ == "__main__":
    main()
