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
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from cells import Cell, add_arguments, results, run
from gnomon.chat.constraint import Constraint, json_schema
from gnomon.config import EngineConfig, KernelConfig, SpeculationConfig
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


@dataclass(frozen=True)
class Case:
    prompt: str
    fill: SpeculationConfig
    constraint: Constraint | None = None
    tokens: int = 220
    sampling: SamplingParams = GREEDY


GRAMMAR = SpeculationConfig()
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
    "echo-code": Case(
        f"Repeat this code exactly:\n\n{CODE}\n", SpeculationConfig(fill="echo", num_draft_tokens=16), tokens=160
    ),
    "echo-prose": Case("Tell me about the sea.", SpeculationConfig(fill="echo", num_draft_tokens=16), tokens=160),
}


def answer(engine: Engine, case: Case, batch: int) -> dict[str, Any]:
    """All rows at once: seconds from the first first token to the last end, tokens, forwards and ids."""
    chat = f"<|im_start|>user\n{case.prompt}<|im_end|>\n<|im_start|>assistant\n"
    prompt = engine.tokenizer.encode(chat)
    requests = [
        Request(
            f"r{uuid.uuid4().hex}",
            tuple(prompt),
            case.sampling if case.sampling.seed is None else SamplingParams(temperature=0.8, seed=i + 1),
            case.tokens,
            constraint=case.constraint,
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
    fill = usages[0].fill
    return {
        "seconds": seconds,
        "cpu": time.process_time() - used,
        "tokens": sum(usage.completion_tokens for usage in usages),
        "steps": None if usages[0].speculation is None else usages[0].speculation.target_calls,
        "drafted": 0 if fill is None else fill.verify_drafted + fill.strict,
        "filled": 0 if fill is None else fill.strict + fill.echo + fill.grammar,
        "ids": ids,
    }


class Engines:
    """Both arms of the case that was asked for last, warm."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.name: str | None = None
        self.arms: dict[str, Engine] = {}

    def of(self, name: str) -> dict[str, Engine]:
        if name != self.name:
            self.stop()
            kernels = KernelConfig(kernels=self.args.kernels)
            if self.args.kernel_cache:
                kernels = replace(kernels, kernel_cache=self.args.kernel_cache)
            base = Settings(engine=EngineConfig(batch=max(self.args.batch), prompt_cache=0), kernels=kernels)
            arms = {"without": SpeculationConfig(grammar_jump=False), "with": CASES[name].fill}
            self.arms = {arm: load(self.args.model, replace(base, speculation=how)) for arm, how in arms.items()}
            self.name = name
            for engine in self.arms.values():
                for rows in sorted({1, *self.args.batch}):
                    answer(engine, replace(CASES[name], tokens=32), rows)
        return self.arms

    def stop(self) -> None:
        for engine in self.arms.values():
            engine.stop()

    def cell(self, name: str, batch: int, pair: int) -> dict[str, Any]:
        engines, order = self.of(name), ("without", "with") if pair % 2 == 0 else ("with", "without")
        made = {arm: answer(engines[arm], CASES[name], batch) for arm in order}
        same = made["with"].pop("ids") == made["without"].pop("ids")
        return {"case": name, "batch": batch, "pair": pair, "kernels": self.args.kernels, "same": same, **made}


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
        "| Case | Kernels | Batch | Pairs | Time: median (range) | CPU time | Tokens per forward | Taken of proposed | Same tokens |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for key in dict.fromkeys((cell["case"], cell["batch"], cell["kernels"]) for cell in cells):
        own = [cell for cell in cells if (cell["case"], cell["batch"], cell["kernels"]) == key]
        wall, cpu = (_ratios(own, measure) for measure in ("seconds", "cpu"))
        last = own[-1]["with"]
        per = last["tokens"] / key[1] / last["steps"] if last["steps"] else 1.0
        lines.append(
            f"| {key[0]} | {key[2]} | {key[1]} | {len(own)} | {wall} | {cpu} | {per:.2f} "
            f"| {last['filled']} of {last['drafted']} | {sum(cell['same'] for cell in own)} of {len(own)} |"
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
