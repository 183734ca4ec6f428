"""The prefix cache side by side with mlx_lm.server: time to the first token of a second turn, before and after a restart, and its price.

Every measurement is a cell of its own in a results file; a cell that is there already is not measured again, so an interrupted run goes
on where it was. Cells of both servers alternate; one server is up at a time, except where decoding is compared between settings of one.

    turns     a server starts, reads a history of so many tokens, answers, and is asked a second question: time to both first tokens
    restart   the same, but the server is restarted before the second question (Gnomon with its tier on disk)
    decode    tokens per second with the cache off, in memory, and on disk as well: blocks of one answer from each, in changing order
    transfer  what writing and restoring the history's state took, as the server tells it

    uv run python benchmarks/prefix_cache.py MODEL --plan [--flag=--kernels=native ...]      (what is left, and for how long)
    uv run python benchmarks/prefix_cache.py MODEL [--quick] [--flag=--kernels=native ...] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from children import Child, running
from gnomon.bench.http import Streamed, gnomon_command, mlx_lm_command, stream_completion
from gnomon.bench.preflight import awake, preflight
from gnomon.bench.provenance import provenance
from gnomon.bench.report import table
from gnomon.bench.statistics import interval, percent
from gnomon.chat.tokenizer import Tokenizer
from gnomon.config import settings

OURS, STOCK = "gnomon", "mlx_lm.server"
ANSWER = 8
"""Tokens of the first answer."""
HAS_DISK = any(setting.flag == "--ssd-cache" for setting in settings())
STORY = (
    "the cat sat on the mat and the old dog ran after it while the captain read a list of files and wrote the next one"
)


@dataclass(frozen=True, slots=True)
class Cell:
    """One thing to measure. `size` are tokens of history, or of each answer for `decode`."""

    kind: str
    arm: str
    size: int
    block: int

    def __str__(self) -> str:
        return f"{self.kind}/{self.arm}/{self.size}/{self.block}"


@dataclass(frozen=True, slots=True)
class Scope:
    """How much to measure: blocks by size for each server, and answers for `decode`."""

    ours: dict[int, int]
    stock: dict[int, int]
    stock_restart: dict[int, int]
    decode_tokens: int
    decode_blocks: int

    def cells(self) -> Iterator[Cell]:
        """In the order of measuring: the servers alternate, and change places from block to block."""
        for kind, stock in (("turns", self.stock), ("restart", self.stock_restart)):
            if kind == "restart" and not HAS_DISK:
                continue
            for size in sorted(self.ours):
                for block in range(max(self.ours[size], stock.get(size, 0))):
                    pair = [
                        Cell(kind, arm, size, block)
                        for arm, blocks in ((OURS, self.ours[size]), (STOCK, stock.get(size, 0)))
                        if block < blocks
                    ]
                    yield from reversed(pair) if block % 2 else pair
        if HAS_DISK:
            yield from (Cell("transfer", OURS, size, 0) for size in sorted(self.ours))
        yield Cell("decode", OURS, self.decode_tokens, self.decode_blocks)


FULL = Scope({1000: 5, 4000: 5, 7000: 3}, {1000: 3, 4000: 1, 7000: 1}, {1000: 1}, 128, 8)
QUICK = Scope({200: 1}, {200: 1}, {200: 1}, 16, 2)


class Results:
    """A JSON file with what was measured, written after each cell."""

    def __init__(self, path: Path, about: dict[str, Any]) -> None:
        """Raises SystemExit when the file holds another model's or other flags' results."""
        self.path = path
        self.whole: dict[str, Any] = {"about": about, "cells": {}}
        if path.is_file():
            self.whole = json.loads(path.read_text())
            for name in ("model", "flags", "model_sha256"):
                if self.whole["about"].get(name) != about[name]:
                    raise SystemExit(
                        f"{path} holds results of {name} {self.whole['about'].get(name)}, not {about[name]}"
                    )

    @property
    def cells(self) -> dict[str, dict[str, Any]]:
        return self.whole["cells"]

    def add(self, cell: Cell, found: dict[str, Any]) -> None:
        self.cells[str(cell)] = found
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text(json.dumps(self.whole, indent=1))
        temporary.replace(self.path)

    def values(self, kind: str, arm: str, size: int, name: str) -> dict[int, float]:
        """A number of a cell by block, where it was measured."""
        found: dict[int, float] = {}
        for key, cell in self.cells.items():
            its_kind, its_arm, its_size, block = key.split("/")
            if (its_kind, its_arm, int(its_size)) == (kind, arm, size) and name in cell:
                found[int(block)] = cell[name]
        return found


class Bench:
    """Runs cells."""

    def __init__(self, model: Path, flags: Sequence[str]) -> None:
        self.model = model
        self.flags = list(flags)
        self.tokenizer = Tokenizer.load(model)

    def run(self, cell: Cell) -> dict[str, Any]:
        match cell.kind:
            case "turns":
                return self.turns(cell)
            case "restart":
                return self.restart(cell)
            case "transfer":
                return self.transfer(cell)
            case _:
                return self.decode(cell)

    def history(self, size: int, block: int) -> str:
        """About `size` tokens that no other block begins with."""
        chance, words = random.Random(1000 * size + block), STORY.split()
        text = f"Story {chance.getrandbits(40):x}:"
        while len(self.tokenizer.encode(text)) < size:
            text += "".join(f" {chance.choice(words)}" for _ in range(max(1, size // 20)))
        return text

    def first(self, cell: Cell) -> str:
        # In the middle of a sentence: after a question a small model may have nothing to say.
        return self.history(cell.size, cell.block) + " and when the night came, the old captain said that the"

    @staticmethod
    def second(first: str, answer: str) -> str:
        return (
            first
            + answer
            + ". In the morning the dog had run away, and the captain took his pen and began to write about the"
        )

    def server(self, cell: Cell, *flags: str):
        made = mlx_lm_command(self.model) if cell.arm == STOCK else gnomon_command(self.model, *self.flags, *flags)
        return running(made)

    def turns(self, cell: Cell) -> dict[str, Any]:
        first = self.first(cell)
        with self.server(cell) as child:
            warm(child)
            cold = stream_completion(child.client, first, ANSWER)
            second = stream_completion(child.client, self.second(first, cold.text), ANSWER)
        return {**numbers("cold", cold), **numbers("second", second)}

    def restart(self, cell: Cell) -> dict[str, Any]:
        first = self.first(cell)
        with tempfile.TemporaryDirectory() as disk:
            flags = ("--ssd-cache", disk) if cell.arm == OURS else ()
            with self.server(cell, *flags) as child:
                warm(child)
                cold = stream_completion(child.client, first, ANSWER)
                told = child.post("/admin/cache/flush", {}) if cell.arm == OURS else {}
            with self.server(cell, *flags) as child:
                warm(child)
                second = stream_completion(child.client, self.second(first, cold.text), ANSWER)
                tier = (second.usage or {}).get("cache", {}).get("tier", "none")
        return {**numbers("cold", cold), **numbers("second", second), "tier": tier, "flush": told}

    def transfer(self, cell: Cell) -> dict[str, Any]:
        first = self.first(cell)
        with tempfile.TemporaryDirectory() as disk:
            with self.server(cell, "--ssd-cache", disk) as child:
                cold = stream_completion(child.client, first, ANSWER)
                begun = time.perf_counter()
                told = child.post("/admin/cache/flush", {})
                seconds, written = time.perf_counter() - begun, child.stats().get("ssd_cache")
            with self.server(cell, "--ssd-cache", disk) as child:
                second = stream_completion(child.client, self.second(first, cold.text), ANSWER)
                restored = child.stats().get("ssd_cache")
            size = sum(path.stat().st_size for path in Path(disk).rglob("*") if path.is_file())
        return {
            "flush": told,
            "flush_seconds": seconds,
            "disk_bytes": size,
            "after_write": written,
            "after_restore": restored,
            "cached_tokens": second.cached_tokens,
        }

    def decode(self, cell: Cell) -> dict[str, Any]:
        """Rates by setting and block. The servers stay up together; one works at a time."""
        disk = tempfile.mkdtemp()
        arms: dict[str, list[str]] = {"off": ["--prompt-cache", "0"], "memory": []}
        if HAS_DISK:
            arms["disk"] = ["--ssd-cache", disk]
        rates: dict[str, list[float]] = {name: [] for name in arms}
        try:
            with ExitStack() as stack:
                children = {name: stack.enter_context(self.server(cell, *flags)) for name, flags in arms.items()}
                for child in children.values():
                    warm(child)
                for block in range(cell.block):
                    names = list(arms)
                    for name in names[block % len(names) :] + names[: block % len(names)]:
                        prompt = self.history(100, block) + " and when the night came, the old captain said that the"
                        rate = stream_completion(children[name].client, prompt, cell.size).decode_rate
                        rates[name].append(rate if rate is not None else math.nan)
        finally:
            shutil.rmtree(disk, ignore_errors=True)
        return {"rates": rates}


def warm(child: Child) -> None:
    """The first request of a process compiles and allocates; it is not what is measured."""
    stream_completion(child.client, "Once upon a time", 2)


def numbers(name: str, found: Streamed) -> dict[str, Any]:
    return {
        f"{name}_first_seconds": found.outputs[0] - found.begun,
        f"{name}_prompt_tokens": found.prompt_tokens,
        f"{name}_cached_tokens": found.cached_tokens,
    }


def minutes(cell: Cell, rates: dict[str, float]) -> float:
    """About how long a cell takes, given prompt tokens per second by server. Starts of servers count ten seconds."""
    start, rate = 10.0, rates[cell.arm]
    match cell.kind:
        case "turns":
            seconds = start + (cell.size + 2 * ANSWER + 40) / rate
        case "restart":
            seconds = 2 * start + ((1 if cell.arm == OURS else 2) * cell.size + 40) / rate
        case "transfer":
            seconds = 2 * start + (cell.size + 40) / rate
        case _:
            seconds = 3 * start + 3 * cell.block * (100 / rate + cell.size / max(10.0, rate / 4))
    return seconds / 60


def report(results: Results) -> str:
    """Markdown: medians, and the ratio of stock to ours where blocks are paired."""
    rows: list[list[str]] = []
    sizes = sorted({int(key.split("/")[2]) for key in results.cells if key.startswith(("turns", "restart"))})
    for kind, name, title in (
        ("turns", "cold_first_seconds", "first turn"),
        ("turns", "second_first_seconds", "second turn"),
        ("restart", "second_first_seconds", "second turn after a restart"),
    ):
        for size in sizes:
            ours, stock = (results.values(kind, arm, size, name) for arm in (OURS, STOCK))
            if not ours:
                continue
            both = sorted(ours.keys() & stock.keys())
            logs = [math.log(stock[block] / ours[block]) for block in both]
            ratio = f"{math.exp(median(logs)):.1f}x in {len(logs)}" if logs else "not measured"
            shown = [
                f"{median(side.values()):.3f} s ({len(side)})" if side else "not measured" for side in (ours, stock)
            ]
            rows.append([f"{title}, {size} tokens", *shown, ratio])
    text = table(("time to first token", OURS, STOCK, "stock over ours"), rows)
    for key, cell in results.cells.items():
        if key.startswith("decode"):
            rates = cell["rates"]
            for name in rates:
                if name != "off" and len(rates[name]) > 1:
                    found = interval([math.log(a / b) for a, b in zip(rates[name], rates["off"], strict=True)])
                    text += (
                        f"\n\ndecode, cache {name} against off: {percent(found.estimate)} "
                        f"[{percent(found.lower)}, {percent(found.upper)}] in {found.blocks} blocks, "
                        f"{median(rates[name]):.1f} and {median(rates['off']):.1f} tokens/s"
                    )
        if key.startswith("transfer"):
            text += f"\n\n{key}: {cell['disk_bytes']} bytes, written by {cell['flush_seconds']:.3f} s after the answer"
            text += f"; restored {cell['cached_tokens']} tokens, last restore {(cell['after_restore'] or {}).get('restore_ms_last')} ms"
    return text + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what is missing and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="an MLX model directory")
    parser.add_argument("--quick", action="store_true", help="200 tokens of history, one block: to see that it works")
    parser.add_argument(
        "--plan", action="store_true", help="list what is left and about how long it takes, and measure nothing"
    )
    parser.add_argument(
        "--only", default="", help="measure only cells whose name begins like this, such as turns/gnomon"
    )
    parser.add_argument("--flag", action="append", default=[], help="flag of Gnomon's server; may be repeated")
    parser.add_argument("--rate", type=float, default=15.0, help="Gnomon's prompt tokens per second, for the plan")
    parser.add_argument("--stock-rate", type=float, default=15.0, help="mlx-lm's")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/prefix-cache.json"))
    a = parser.parse_args(argv)
    origin, state = provenance(a.model), preflight()
    about = {
        "model": a.model.name,
        "flags": a.flag,
        "model_sha256": origin.model_sha256,
        "provenance": origin.model_dump(mode="json"),
        "preflight": state.model_dump(mode="json"),
    }
    results = Results(a.out, about)
    scope = QUICK if a.quick else FULL
    left = [cell for cell in scope.cells() if str(cell) not in results.cells and str(cell).startswith(a.only)]
    costs = {str(cell): minutes(cell, {OURS: a.rate, STOCK: a.stock_rate}) for cell in left}
    if a.plan:
        for name, cost in costs.items():
            print(f"{cost:6.1f} min  {name}")
    print(
        f"{len(left)} cells left, about {sum(costs.values()):.0f} minutes; tier on disk: {'yes' if HAS_DISK else 'no'}"
    )
    if a.plan:
        return 0
    bench = Bench(a.model, a.flag)
    with awake():
        for cell in left:
            begun = time.perf_counter()
            results.add(cell, {**bench.run(cell), "wall_seconds": time.perf_counter() - begun, "at": time.time()})
            print(f"{cell}: {time.perf_counter() - begun:.0f} s", flush=True)
    text = report(results)
    if state.problems:
        text += f"\nThe machine was not quiet: {'; '.join(state.problems)}.\n"
    a.out.with_suffix(".md").write_text(text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
