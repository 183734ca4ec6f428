"""Prompt lookup, or a draft model, against plain decoding: the same requests through two engines of one process, in alternating pairs.

uv run python benchmarks/speculation.py MODEL [--draft DIR] [--kernels native] [--batches 1 4 8] [--pairs 5] [--tokens 128] [--pins 2 4 8]
                                              [--out FOLDER] [--cells 'code*'] [--minutes N] [--random-1b DIR [--bits 4]]

A cell is a workload, a batch and a pair; several processes may share them (benchmarks/cells.py). --random-1b makes a model of the shape of
Llama 3.2 1B with random weights in DIR, with MODEL's tokenizer, and measures that.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models import llama

from cells import Cell, add_arguments, results, run
from gnomon.chat.tokenizer import Tokenizer
from gnomon.config import EngineConfig, KernelConfig, SpeculationConfig, resolve
from gnomon.engine.api import Delta, Event, Failed, Finished, Request
from gnomon.engine.engine import Engine, load
from gnomon.engine.settings import Settings

_FUNCTIONS = ("add", "subtract", "multiply", "divide", "power", "remainder", "maximum", "minimum")
_CODE = "\n\n".join(
    f'def {name}(first: float, second: float) -> float:\n    """Apply {name} to two numbers."""\n'
    f"    check_number(first)\n    check_number(second)\n    return OPERATIONS[{name!r}](first, second)"
    for name in _FUNCTIONS[:5]
)
_RECORDS = "\n".join(
    f"Ticket {4100 + 37 * i}: customer {name} of {town} reports that the {part} stopped working after the update on May {i + 2}."
    for i, (name, town, part) in enumerate(
        [("Okafor", "Leeds", "printer queue"), ("Lindqvist", "Uppsala", "login page"), ("Moreau", "Lyon", "export button"),
         ("Tanaka", "Osaka", "search index"), ("Novak", "Brno", "mail gateway"), ("Silva", "Porto", "report viewer")]
    )
)  # fmt: skip


@dataclass(frozen=True)
class Text:
    """What is asked, and how the answer begins: small models do what they are asked only where they see themselves do it."""

    prompt: str
    begun: str = ""


WORKLOADS = {
    "code editing": [
        Text(f"Repeat this code exactly, but rename {name} to {name}_numbers:\n```python\n{_CODE}\n```")
        for name in _FUNCTIONS
    ],
    "code completed": [
        # A file is quoted, its first half is written again with one name changed all through, and the second half is to come.
        Text(
            f"Rewrite this file with check_number renamed to {name}:\n```python\n{_CODE}\n```",
            "```python\n" + "".join(f"def {part}" for part in _CODE.replace("check_number", name).split("def ")[1:4]),
        )
        for name in ("verify", "check_value", "require_number", "validate", "assert_number", "ensure_float", "test_number", "guard")
    ],
    "retrieval": [
        Text(f"Here are support tickets:\n{_RECORDS}\nCopy all the tickets word for word, beginning with number {i % 6 + 1}.")
        for i in range(8)
    ],
    "quoting": [
        Text(
            f"Here are support tickets:\n{_RECORDS}\nCopy all the tickets word for word, beginning with number {i % 6 + 1}.",
            f"Here are the tickets, word for word:\nTicket {4100 + 37 * (i % 6)}:",
        )
        for i in range(8)
    ],
    "prose": [
        Text(f"Write a long story about {topic}.")
        for topic in ("a lighthouse", "two rivers", "a clockmaker", "the first snow", "a lost map", "an old train",
                      "a night market", "the last bee")
    ],
}  # fmt: skip


def serve(engine: Engine, requests: Sequence[Request]) -> tuple[float, list[tuple[int, ...]]]:
    """Run requests at once; seconds from the first token of the last to start to the end, and each one's ids."""
    ids: dict[str, list[int]] = {request.id: [] for request in requests}
    first: dict[str, float] = {}
    left, failures = threading.Semaphore(0), list[str]()

    def sink(event: Event) -> None:
        if isinstance(event, Delta):
            first.setdefault(event.request_id, time.perf_counter())
            ids[event.request_id].extend(event.ids)
        elif isinstance(event, Finished | Failed):
            if isinstance(event, Failed):
                failures.append(event.message)
            left.release()

    for request in requests:
        engine.submit(request, sink)
    for _ in requests:
        left.acquire()
    if failures:
        raise RuntimeError(failures[0])
    return time.perf_counter() - max(first.values()), [tuple(one) for one in ids.values()]


def counted(engine: Engine) -> tuple[int, int, int, int]:
    """Steps with guesses, steps that could have had some, proposed and accepted tokens so far."""
    stats = engine.stats()
    depths = {int(depth): count for depth, count in stats["speculation"]["depths"].items()}
    proposals = stats["proposals"]
    return sum(n for d, n in depths.items() if d), sum(depths.values()), proposals["proposed"], proposals["accepted"]


def measure(
    engines: dict[str, Engine], tokenizer: Tokenizer, workload: str, batch: int, pair: int, args: Any
) -> dict[str, Any]:
    """One pair: the same requests through both engines, alone on the machine one after the other. Alone, each pair asks another."""
    texts = [WORKLOADS[workload][(pair + i) % len(WORKLOADS[workload])] for i in range(batch)]
    chats = (f"<|im_start|>user\n{text.prompt}<|im_end|>\n<|im_start|>assistant\n{text.begun}" for text in texts)
    prompts = [tuple(tokenizer.encode(chat)) for chat in chats]
    seconds: dict[str, float] = {}
    used: dict[str, float] = {}
    answers: dict[str, list[tuple[int, ...]]] = {}
    before = counted(engines["on"])
    for name in sorted(engines, reverse=pair % 2 == 0):
        requests = [
            Request(f"{name} {workload} {batch} {pair} {i}", prompt, max_tokens=args.tokens, ignore_eos=True)
            for i, prompt in enumerate(prompts)
        ]
        cpu = time.process_time()
        seconds[name], answers[name] = serve(engines[name], requests)
        used[name] = time.process_time() - cpu
    windows, steps, proposed, accepted = (after - b for after, b in zip(counted(engines["on"]), before, strict=True))
    return {
        "seconds": seconds,
        "cpu": used,
        "tokens": batch * args.tokens,
        "windows": windows,
        "steps": steps,
        "proposed": proposed,
        "accepted": accepted,
        "differing": sum(a != b for own in answers.values() for a, b in zip(answers["off"], own, strict=True)),
    }


def make_1b(path: Path, like: Path, bits: int | None = None) -> Path:
    """A random model of the shape of Llama 3.2 1B in bfloat16, or of so many bits, with another model's tokenizer."""
    if (path / "model.safetensors").is_file():
        return path
    path.mkdir(parents=True, exist_ok=True)
    settings = json.loads((like / "config.json").read_text())
    shape = {
        "model_type": "llama", "hidden_size": 2048, "num_hidden_layers": 16, "intermediate_size": 8192, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 64, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "max_position_embeddings": 8192,
        "vocab_size": settings["vocab_size"], "tie_word_embeddings": True, "eos_token_id": settings.get("eos_token_id"),
    }  # fmt: skip
    mx.random.seed(0)
    model = llama.Model(llama.ModelArgs.from_dict(shape))
    model.set_dtype(mx.bfloat16)
    if bits is not None:
        nn.quantize(model, 64, bits)
        shape["quantization"] = {"group_size": 64, "bits": bits}
    mx.save_safetensors(str(path / "model.safetensors"), dict(tree_flatten(model.parameters())), {"format": "mlx"})
    (path / "config.json").write_text(json.dumps(shape))
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json"):
        if (like / name).is_file():
            shutil.copy(like / name, path / name)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--draft", type=Path)
    parser.add_argument("--kernels", choices=("native", "stock"), default="native")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--workloads", nargs="+", choices=tuple(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument(
        "--pins", type=int, nargs="+", default=[], help="also with so many tokens guessed at every step"
    )
    parser.add_argument("--random-1b", type=Path)
    parser.add_argument("--bits", type=int, help="quantise that model to so many bits")
    add_arguments(parser, "speculation")
    args = parser.parse_args()
    path = args.model if args.random_1b is None else make_1b(args.random_1b, args.model, args.bits)
    measurements, tokenizer = resolve().paths.cache, Tokenizer.load(path)
    config = EngineConfig(prompt_cache=0, batch=max(args.batches))
    wanted = SpeculationConfig(str(args.draft)) if args.draft else SpeculationConfig(draft_kind="ngram")

    @cache
    def engines() -> dict[str, Engine]:
        return {
            name: load(
                path,
                Settings(
                    engine=config,
                    kernels=KernelConfig(kernels=args.kernels),
                    speculation=speculation,
                    measurements=measurements,
                ),
            )
            for name, speculation in (
                ("off", SpeculationConfig()),
                ("on", wanted),
                *((f"depth {n}", replace(wanted, num_draft_tokens=n)) for n in args.pins),
            )
        }

    device, kind = str(mx.default_device()), f"{args.kernels} {'two-model' if args.draft else 'ngram'}"

    @cache
    def warmed() -> dict[str, Engine]:
        # Kernels and graphs are made for numbers of rows, and windows of guesses have kernels of their own.
        prompt = tuple(tokenizer.encode("one two three four " * 12))
        for name, engine in engines().items():
            for rows in sorted(set(args.batches)):
                serve(engine, [Request(f"{name} first {rows} {i}", prompt, max_tokens=24) for i in range(rows)])
        return engines()

    def cell(workload: str, batch: int, pair: int) -> dict[str, Any]:
        about = {
            "model": path.name,
            "device": device,
            "kernels": kind,
            "workload": workload,
            "batch": batch,
            "pair": pair,
        }
        return {**about, **measure(warmed(), tokenizer, workload, batch, pair, args)}

    work = [
        Cell(f"{workload} batch {batch} pair {pair} {kind} {path.name}", partial(cell, workload, batch, pair))
        for pair in range(args.pairs)
        for batch in args.batches
        for workload in args.workloads
    ]
    try:
        run(work, args)
    finally:
        if engines.cache_info().currsize:
            print(json.dumps(engines()["on"].stats()["speculation"]["curve"]))
            for engine in engines().values():
                engine.stop()
    if not args.list:
        print(table([one for one in results(args.out) if "error" not in one]))


def table(found: Sequence[dict[str, Any]]) -> str:
    """Ratios are off over on: of seconds from the first token to the last, and of the process's CPU seconds, prefill included."""
    lines = [
        "| Workload | Batch | Model, kernels | Off, token/s | Time: median (range) | CPU time | Guessed | Accepted | Differing | Pairs |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for key in dict.fromkeys((c["workload"], c["batch"], c["model"], c["kernels"]) for c in found):
        own = [c for c in found if (c["workload"], c["batch"], c["model"], c["kernels"]) == key]
        windows, steps, proposed, accepted, differing = (
            sum(c[name] for c in own) for name in ("windows", "steps", "proposed", "accepted", "differing")
        )
        off = statistics.median(c["tokens"] / c["seconds"]["off"] for c in own)
        pinned = "".join(
            f"; {name} {_ratios(with_it := [c for c in own if name in c['seconds']], 'seconds', name)}, CPU {_ratios(with_it, 'cpu', name)}"
            for name in dict.fromkeys(name for c in own for name in c["seconds"] if name not in ("off", "on"))
        )
        lines.append(
            f"| {key[0]} | {key[1]} | {key[2]}, {key[3]} | {off:.1f} | {_ratios(own, 'seconds')}{pinned} | {_ratios(own, 'cpu')} "
            f"| {windows / max(1, steps):.0%} | {accepted / max(1, proposed):.0%} | {differing} | {len(own)} |"
        )
    return "\n".join(lines)


def _ratios(cells: Sequence[dict[str, Any]], measure: str, name: str = "on") -> str:
    each = [c[measure]["off"] / c[measure][name] for c in cells]
    return f"{statistics.median(each):.2f} ({min(each):.2f} to {max(each):.2f})"


if __name__ == "__main__":
    main()
