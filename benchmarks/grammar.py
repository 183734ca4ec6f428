"""What a grammar costs: the same number of tokens drawn under one and freely, in interleaved pairs, and the time to compile calls of tools.

    uv run python benchmarks/grammar.py MODEL --out grammar.jsonl [--kernels native] [--batch 1 8] [--pairs 5] [--tokens 128] [--tools 50]

Every row of a batch has another grammar, none of which can end before the tokens do; nothing is proposed. Each cell (kind, batch, pair)
is one line of the output, written when it is done: a run that was cut short goes on where it stopped. Who goes first alternates. Ratios are
under a grammar over free: of seconds per token of decoding, and of the process's CPU seconds, which a busy machine disturbs less.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gnomon.chat.constraint import Constraint, json_schema
from gnomon.chat.tool_choice import tool_call
from gnomon.chat.tools import GENERIC
from gnomon.config import EngineConfig, KernelConfig, SpeculationConfig
from gnomon.engine.api import Failed, Finished, Request, SamplingParams
from gnomon.engine.engine import Engine, load
from gnomon.engine.settings import Settings

ARMS = ("free", "grammar")
CLOSED = {"additionalProperties": False}


def endless(row: int) -> Constraint:
    """A list of objects, longer than anybody waits for; every row's have other keys."""
    properties = {
        f"name_{row}": {"type": "string", "maxLength": 16},
        f"count_{row}": {"type": "integer", "minimum": 0, "maximum": 9999},
        f"kind_{row}": {"enum": ["one", "another", None]},
    }
    item = {"type": "object", "properties": properties, "required": list(properties), **CLOSED}
    return json_schema({"type": "array", "items": item, "minItems": 400})


def tools(count: int, salt: str) -> list[dict[str, Any]]:
    """Tools as agents have them: six parameters, of which one is an object and one a list."""
    text, number = {"type": "string", "description": "A text."}, {"type": "integer", "minimum": 0}
    position = {"type": "object", "properties": {"line": number, "column": number}, "required": ["line"], **CLOSED}
    properties: dict[str, Any] = {
        "path": text,
        "mode": {"enum": ["read", "write", "append"]},
        "limit": number,
        "recursive": {"type": "boolean"},
        "patterns": {"type": "array", "items": text, "maxItems": 10},
        "position": position,
    }
    parameters = {"type": "object", "properties": properties, "required": ["path"], **CLOSED}
    return [
        {"type": "function", "function": {"name": f"tool_{salt}_{i}", "parameters": parameters}} for i in range(count)
    ]


def decode(engine: Engine, arm: str, batch: int, tokens: int) -> dict[str, Any]:
    """All rows at once: seconds after the prompt, CPU seconds, tokens, and the host's seconds for masks."""
    prompt = tuple(
        engine.tokenizer.encode("<|im_start|>user\nMany things, as JSON.<|im_end|>\n<|im_start|>assistant\n")
    )
    requests = [
        Request(
            uuid.uuid4().hex,
            prompt,
            SamplingParams(temperature=1.0, seed=row),
            tokens,
            ignore_eos=True,
            constraint=endless(row) if arm == "grammar" else None,
        )
        for row in range(batch)
    ]
    masks = engine.stats()["grammar"]["mask_seconds"]
    streams = [engine.stream(each) for each in requests]
    begun, used = time.perf_counter(), time.process_time()
    usages: list[Any] = []
    for stream in streams:
        for event in stream:
            if isinstance(event, Failed):
                raise RuntimeError(event.message)
            if isinstance(event, Finished):
                usages.append(event.usage)
    return {
        "seconds": time.perf_counter() - begun - min(usage.prefill_seconds for usage in usages),
        "cpu": time.process_time() - used,
        "tokens": sum(usage.completion_tokens for usage in usages),
        "mask_seconds": engine.stats()["grammar"]["mask_seconds"] - masks,
    }


def compiled(engine: Engine, count: int) -> dict[str, Any]:
    """Seconds to make the grammar of calls of so many tools and to compile it, which its first request waits for."""
    offered = tools(count, uuid.uuid4().hex[:6])
    begun = time.perf_counter()
    wanted = tool_call(GENERIC, offered)
    made = time.perf_counter()
    engine.compile(wanted)
    return {"grammar": made - begun, "compile": time.perf_counter() - made, "characters": len(wanted.source)}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--kernels", choices=("native", "stock"), default="native")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--tools", type=int, default=50)
    args = parser.parse_args(arguments)
    done = [json.loads(line) for line in args.out.read_text().splitlines()] if args.out.exists() else []
    have = {(cell["kind"], cell["batch"], cell["pair"]) for cell in done}
    missing = [
        (kind, batch, pair)
        for kind, batch in (("compile", args.tools), *(("decode", batch) for batch in args.batch))
        for pair in range(args.pairs)
        if (kind, batch, pair) not in have
    ]
    if missing:
        settings = Settings(
            engine=EngineConfig(batch=max(args.batch), prompt_cache=0),
            kernels=KernelConfig(kernels=args.kernels),
            speculation=SpeculationConfig(grammar_jump=False),
        )
        with load(args.model, settings) as engine:
            for batch in args.batch:
                # Compiles every row's grammar, and the index of the vocabulary, once.
                for arm in ARMS:
                    decode(engine, arm, batch, 4)
            for kind, batch, pair in missing:
                cell: dict[str, Any] = {"kind": kind, "batch": batch, "pair": pair, "kernels": args.kernels}
                if kind == "compile":
                    cell |= compiled(engine, batch)
                else:
                    order = ARMS if pair % 2 == 0 else ARMS[::-1]
                    cell |= {arm: decode(engine, arm, batch, args.tokens) for arm in order}
                done.append(cell)
                with args.out.open("a") as file:
                    file.write(json.dumps(cell) + "\n")
    print(table(done))


def table(cells: Sequence[dict[str, Any]]) -> str:
    """Medians and ranges of what was measured."""
    lines = [
        "| Batch | Pairs | Time per token, grammar / free: median (range) | CPU time | Masks on the host, per token |",
        "|---|---|---|---|---|",
    ]
    for batch in dict.fromkeys(cell["batch"] for cell in cells if cell["kind"] == "decode"):
        own = [cell for cell in cells if (cell["kind"], cell["batch"]) == ("decode", batch)]
        wall, cpu = (_ratios(own, measure) for measure in ("seconds", "cpu"))
        masks = statistics.median(cell["grammar"]["mask_seconds"] / cell["grammar"]["tokens"] for cell in own)
        lines.append(f"| {batch} | {len(own)} | {wall} | {cpu} | {masks * 1e6:.0f} µs |")
    for count in dict.fromkeys(cell["batch"] for cell in cells if cell["kind"] == "compile"):
        times = [
            cell["grammar"] + cell["compile"] for cell in cells if (cell["kind"], cell["batch"]) == ("compile", count)
        ]
        spread = f"{min(times) * 1e3:.0f} to {max(times) * 1e3:.0f}"
        lines.append(
            f"\n{count} tools: {statistics.median(times) * 1e3:.0f} ms ({spread}) until the grammar is ready, {len(times)} times."
        )
    return "\n".join(lines)


def _ratios(cells: Sequence[dict[str, Any]], measure: str) -> str:
    each = [
        (c["grammar"][measure] / c["grammar"]["tokens"]) / (c["free"][measure] / c["free"]["tokens"]) for c in cells
    ]
    return f"{statistics.median(each):.3f} ({min(each):.3f} to {max(each):.3f})"


if __name__ == "__main__":
    main()
