"""One model over several processes against the same model in one: are the tokens the same, and what does it cost?

The whole engine runs: rank 0 is asked, the others follow. The model is random, in Llama's shape, and written to a directory first.

    python benchmarks/distributed_check.py [--backend ring|nccl] [--ranks 2] [--size tiny|1B|8B] [--dtype bfloat16] [--tokens 64]
        [--out FILE]

`ring` runs on the machine's own loopback (on CPUs also without GPUs), `nccl` gives each process a GPU of its own. Needs mlx, mlx-lm and
what the engine imports (transformers, tokenizers, numpy, psutil, platformdirs, llguidance), no network and no web library. Prints one JSON
object; status 1 if a token differs where the model wasn't undecided: `near_tie` is the gap between the two best log probabilities there.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    "1B": {
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "intermediate_size": 8192,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "8B": {
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
}
STORY = "the cat sat on the mat and the old dog ran after it while the captain read the list of files"
WORDS = STORY.split(" ")
TIE = {"float32": 0.01, "float16": 0.05, "bfloat16": 0.25}
"""Gaps of log probability under which two ways of rounding may choose differently; on GPUs float32 products run in TF32."""
LIMIT = 500.0


def prompts() -> list[str]:
    """A few words to a few thousand."""
    return [" ".join(WORDS[(i * 7 + j) % len(WORDS)] for j in range(n)) for i, n in enumerate((3, 40, 150, 900))]


def write_model(path: Path, size: str, dtype: str) -> None:
    """A model directory with random weights that spread the logits."""
    sys.path.insert(0, str(ROOT / "tests"))
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_lm.models import llama

    import tiny_models

    path.mkdir(parents=True)
    about = {
        **tiny_models.config("llama"),
        **SIZES[size],
        "head_dim": SIZES[size]["hidden_size"] // SIZES[size]["num_attention_heads"],
        "max_position_embeddings": 8192,
    }
    (path / "config.json").write_text(json.dumps(about))
    mx.random.seed(1)
    model = llama.Model(llama.ModelArgs.from_dict(about))
    model.set_dtype(getattr(mx, dtype))
    # A larger head than a trained model's: near ties would say nothing.
    model.lm_head.weight = (model.lm_head.weight * 8).astype(getattr(mx, dtype))
    mx.eval(model.parameters())
    mx.save_safetensors(str(path / "model.safetensors"), dict(tree_flatten(model.parameters())), {"format": "mlx"})
    tiny_models.tokenizer().save(str(path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": tiny_models.EOS}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))


def work(args: argparse.Namespace) -> None:
    """One process: the engine alone, or as one of several; rank 0 writes what it answered."""
    sys.path.insert(0, str(ROOT / "src"))
    import mlx.core as mx

    from gnomon.config import EngineConfig, KernelConfig
    from gnomon.engine.api import Request, SamplingParams
    from gnomon.engine.completion import Completion, collect
    from gnomon.engine.engine import load
    from gnomon.engine.ranks import join
    from gnomon.engine.settings import Host, Settings

    ranks = None if args.backend == "none" else join(args.backend, "127.0.0.1")
    settings = Settings(EngineConfig(prefill_chunk=512), kernels=KernelConfig(kernels="stock"))
    begun = time.perf_counter()
    with load(args.model, settings, Host(ranks=ranks)) as engine:
        if ranks is not None and not ranks.leads:
            engine.ended()
            return
        loaded = time.perf_counter() - begun

        def ask(name: str, text: str, tokens: int) -> Request:
            ids = tuple(engine.tokenizer.encode(text, special=False))
            greedy = SamplingParams(temperature=0, logprobs=2)
            return Request(id=name, prompt=ids, sampling=greedy, max_tokens=tokens, ignore_eos=True)

        def told(done: Completion) -> dict[str, Any]:
            choice = done.choices[0]
            gaps = [one.top[0].logprob - one.top[1].logprob for one in choice.logprobs]
            return {
                "ids": choice.ids,
                "gaps": gaps,
                "tokens_per_second": args.tokens / max(1e-9, done.usage.decode_seconds),
            }

        texts = prompts()
        collect(engine.stream(ask("warm", texts[1], 8)))
        alone = [told(collect(engine.stream(ask(f"alone {i}", text, args.tokens)))) for i, text in enumerate(texts)]
        together = [engine.stream(ask(f"together {i}", text[3:], args.tokens)) for i, text in enumerate(texts)]
        shared = [told(collect(events)) for events in together]
        report = {
            "alone": alone,
            "together": shared,
            "load_seconds": loaded,
            "active_bytes": mx.get_active_memory(),
            "device": str(mx.device_info().get("device_name") or mx.default_device()),
            "cache_hits": engine.stats()["prompt_cache"]["hits"],
        }
        Path(args.report).write_text(json.dumps(report))


def free_ports(number: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def environments(backend: str, ranks: int, directory: Path) -> list[dict[str, str]]:
    """What mlx.launch sets, by rank."""
    if backend == "none":
        return [{}]
    ports = free_ports(ranks)
    if backend == "ring":
        hosts = directory / "hosts.json"
        hosts.write_text(json.dumps([f"127.0.0.1:{port}" for port in ports]))
        return [{"MLX_HOSTFILE": str(hosts), "MLX_RANK": str(rank)} for rank in range(ranks)]
    common = {"NCCL_HOST_IP": "127.0.0.1", "NCCL_PORT": str(ports[0]), "MLX_WORLD_SIZE": str(ranks)}
    return [{**common, "MLX_RANK": str(rank), "CUDA_VISIBLE_DEVICES": str(rank)} for rank in range(ranks)]


def run(backend: str, args: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """What `ranks` processes answered. Raises RuntimeError with what they said when one fails or none comes to an end."""
    report = directory / f"{backend}.json"
    command = [sys.executable, __file__, "--worker", "--backend", backend, "--model", str(directory / "model")]
    command += ["--report", str(report), "--tokens", str(args.tokens)]
    logs = [directory / f"{backend}.{rank}.log" for rank in range(args.ranks)]
    processes = [
        subprocess.Popen(command, env={**os.environ, **environment}, stdout=log.open("w"), stderr=subprocess.STDOUT)
        for environment, log in zip(environments(backend, args.ranks, directory), logs, strict=False)
    ]
    deadline = time.monotonic() + LIMIT
    try:
        while any(process.poll() is None for process in processes):
            if time.monotonic() > deadline or any(process.poll() for process in processes):
                break
            time.sleep(0.1)
        time.sleep(0.5)
        codes = [process.poll() for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    if any(codes) or None in codes or not report.exists():
        said = "\n".join(f"--- {log.name}\n{log.read_text()[-3000:]}" for log in logs if log.exists())
        raise RuntimeError(f"{backend}: the processes ended with {codes}\n{said}")
    return json.loads(report.read_text())


def compare(one: list[dict[str, Any]], several: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Where each answer first differs, and how undecided the model was there."""
    found: list[dict[str, Any]] = []
    for mine, theirs in zip(one, several, strict=True):
        pairs = list(zip(mine["ids"], theirs["ids"], strict=True))
        first = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        found.append(
            {
                "tokens": len(pairs),
                "first_difference": first,
                "near_tie": None if first is None else mine["gaps"][first],
                "smallest_gap": min(mine["gaps"]),
                "tokens_per_second": [round(mine["tokens_per_second"], 1), round(theirs["tokens_per_second"], 1)],
            }
        )
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="ring", choices=("ring", "nccl", "none"))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--size", default="tiny", choices=tuple(SIZES))
    parser.add_argument("--dtype", default="float32", choices=tuple(TIE))
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--out", type=Path)
    for hidden in ("--model", "--report"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(args)
        return 0
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        write_model(directory / "model", args.size, args.dtype)
        one, several = run("none", args, directory), run(args.backend, args, directory)
    told: dict[str, Any] = {
        "backend": args.backend,
        "ranks": args.ranks,
        "size": args.size,
        "dtype": args.dtype,
        **{key: [one[key], several[key]] for key in ("device", "active_bytes", "load_seconds", "cache_hits")},
        **{key: compare(one[key], several[key]) for key in ("alone", "together")},
    }
    answers = [*told["alone"], *told["together"]]
    told["equal"] = all(
        answer["first_difference"] is None or answer["near_tie"] < TIE[args.dtype] for answer in answers
    )
    print(json.dumps(told, indent=1))
    if args.out is not None:
        args.out.write_text(json.dumps(told))
    return 0 if told["equal"] else 1


if __name__ == "__main__":
    sys.exit(main())
