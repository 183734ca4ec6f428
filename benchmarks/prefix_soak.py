"""A soak of the prefix cache: agents that branch, edit, regenerate and compact their conversations, under a small budget.

Several agents talk to one server at once, over HTTP. Each has a system prompt that begins with a line that changes with every request,
and a conversation that mostly grows; now and then it goes back to an earlier turn and takes another way, changes the result of a tool
call, or replaces everything by a summary. Reported are how many prompt tokens were reused, why the others were not, and what memory and
disk did meanwhile.

    uv run python benchmarks/prefix_soak.py MODEL [--turns 200] [--rows 4] [--budget 0.004] [--disk DIR] [--out FILE] [--flag=--l1 ...]
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from children import Child, running
from gnomon.bench.http import gnomon_command

STORY = "the cat sat on the mat and the old dog ran after it while the captain read the list of files and wrote the next one"
WORDS = STORY.split(" ")
Message = dict[str, str]


@dataclass
class Sample:
    """What the server held after so many turns."""

    turns: int
    resident_bytes: int
    active_bytes: int
    cache_bytes: int
    max_cache_bytes: int
    disk_bytes: int


@dataclass
class Report:
    """Of all agents together."""

    turns: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    hits: int = 0
    failures: list[str] = field(default_factory=list)
    tiers: Counter[str] = field(default_factory=Counter)
    misses: Counter[str] = field(default_factory=Counter)
    acts: Counter[str] = field(default_factory=Counter)
    samples: list[Sample] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def reused_share(self) -> float:
        return self.reused_tokens / max(1, self.prompt_tokens)

    def growth(self, name: str) -> float:
        """Largest value of the last quarter of samples over that of the second."""
        values = [getattr(sample, name) for sample in self.samples]
        quarter = max(1, len(values) // 4)
        return max(values[-quarter:]) / max(1, max(values[quarter : 2 * quarter] or values))


class Agent:
    """One conversation and its ways. The same seed asks for the same, if the server answers the same."""

    def __init__(self, seed: int, most_words: int) -> None:
        self.chance = random.Random(seed)
        self.most_words = most_words
        self.system = f"You are agent {seed}. " + self.words(60)
        self.messages: list[Message] = []

    def words(self, count: int) -> str:
        return " ".join(self.chance.choice(WORDS) for _ in range(count))

    def act(self) -> str:
        """Change the conversation so that it ends with something to answer; what was done."""
        size = sum(len(message["content"].split()) for message in self.messages)
        asked = [i for i, message in enumerate(self.messages) if message["role"] == "user"]
        if size > self.most_words:
            self.messages = [{"role": "user", "content": "[summary of what was done] " + self.words(40)}]
            return "compact"
        draw = self.chance.random()
        if len(asked) > 1 and draw < 0.15:
            at = self.chance.choice(asked[:-1])
            self.messages = [*self.messages[:at], {"role": "user", "content": "No, rather " + self.words(12)}]
            return "branch"
        if asked and draw < 0.28:
            at = asked[-1]
            changed = self.messages[at]["content"].split()
            changed[self.chance.randrange(len(changed) // 2, len(changed))] = "changed"
            self.messages = [*self.messages[:at], {"role": "user", "content": " ".join(changed)}]
            return "edit"
        if asked and draw < 0.34:
            self.messages = self.messages[: asked[-1] + 1]
            return "again"
        self.messages.append(
            {"role": "user", "content": "[result of the tool] " + self.words(self.chance.randint(10, 50))}
        )
        return "append"

    def ask(self) -> dict[str, Any]:
        """The body of a request. Its first line differs every time, as that of a known client does."""
        nonce = f"{self.chance.getrandbits(20):05x}"
        first = f"x-anthropic-billing-header: cc_version=2.1.15.{nonce[:3]}; cc_entrypoint=cli; cch={nonce};\n"
        return {
            "messages": [{"role": "system", "content": first + self.system}, *self.messages],
            "max_tokens": self.chance.randint(8, 32),
            "temperature": 0.8,
            "seed": self.chance.getrandbits(30),
        }

    def hear(self, answer: dict[str, Any]) -> None:
        self.messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})


def disk_bytes(directory: Path | None) -> int:
    """Size of the files in a directory that others write to."""
    total = 0
    for path in directory.rglob("*") if directory is not None and directory.is_dir() else ():
        try:
            total += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:
            continue
    return total


def soak(child: Child, turns: int, rows: int, seed: int, most_words: int, disk: Path | None) -> Report:
    """Let `rows` agents take `turns` turns together."""
    report, lock = Report(), threading.Lock()
    begun = time.perf_counter()

    def live(number: int) -> None:
        agent = Agent(seed * 1000 + number, most_words)
        for _ in range(number, turns, rows):
            act = agent.act()
            try:
                answer = child.post("/v1/chat/completions", agent.ask())
            except Exception as error:  # noqa: BLE001  (whatever it is, it is counted and the soak goes on)
                with lock:
                    report.failures.append(f"{type(error).__name__}: {error}")
                continue
            agent.hear(answer)
            usage = answer["usage"]
            with lock:
                note(act, usage)

    def note(act: str, usage: dict[str, Any]) -> None:
        cache = usage["cache"]
        report.turns += 1
        report.acts[act] += 1
        report.prompt_tokens += usage["prompt_tokens"]
        report.reused_tokens += cache["tokens"]
        report.hits += cache["tokens"] > 0
        report.tiers[cache["tier"]] += 1
        report.misses[cache["miss"]["kind"] if cache["miss"] else "none"] += 1
        stats = child.stats()
        report.samples.append(
            Sample(
                report.turns,
                child.resident_bytes,
                stats["memory"]["active_bytes"],
                stats["prompt_cache"]["bytes"],
                stats["prompt_cache"]["max_bytes"],
                disk_bytes(disk),
            )
        )

    with ThreadPoolExecutor(rows) as pool:
        for done in [pool.submit(live, number) for number in range(rows)]:
            done.result()
    report.seconds = time.perf_counter() - begun
    return report


def told(report: Report) -> str:
    """A few lines for people."""
    last = report.samples[-1] if report.samples else Sample(0, 0, 0, 0, 0, 0)
    return "\n".join(
        [
            f"{report.turns} turns in {report.seconds:.0f} s, {len(report.failures)} failed: {dict(report.acts)}",
            f"{report.reused_tokens} of {report.prompt_tokens} prompt tokens reused ({report.reused_share:.1%}), "
            f"in {report.hits} of {report.turns} turns, from {dict(report.tiers)}",
            f"no further because of: {dict(report.misses)}",
            f"cache {last.cache_bytes} of {last.max_cache_bytes} bytes; last quarter over second: "
            f"resident {report.growth('resident_bytes'):.3f}, active {report.growth('active_bytes'):.3f}, "
            f"disk {report.growth('disk_bytes'):.3f} ({last.disk_bytes} bytes)",
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Soak a server of its own; 1 if a request failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="an MLX model directory")
    parser.add_argument("--turns", type=int, default=200)
    parser.add_argument("--rows", type=int, default=4, help="agents, and rows of the server")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--words", type=int, default=400, help="words of a conversation after which it is compacted")
    parser.add_argument("--budget", type=float, default=0.004, help="GiB of memory for the cache")
    parser.add_argument(
        "--disk", type=Path, help="directory that the server's flags have it write to; its size is watched"
    )
    parser.add_argument("--flag", action="append", default=[], help="further flag of the server; may be repeated")
    parser.add_argument("--out", type=Path, help="file for the result as JSON")
    a = parser.parse_args(argv)
    flags = ["--batch", str(a.rows), "--prompt-cache", str(a.budget), *a.flag]
    with running(gnomon_command(a.model, *flags)) as child:
        report = soak(child, a.turns, a.rows, a.seed, a.words, a.disk)
    print(told(report))
    if a.out is not None:
        a.out.parent.mkdir(parents=True, exist_ok=True)
        a.out.write_text(json.dumps(vars(report), default=vars, indent=1))
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
