"""`gnomon chat`: a conversation at the terminal."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Generator, Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gnomon.cli._verbs import CommandError
from gnomon.config import (
    ClientConfig,
    Config,
    EngineConfig,
    KernelConfig,
    KvConfig,
    ModelConfig,
    SamplingDefaults,
    SpeculationConfig,
)

if TYPE_CHECKING:
    from gnomon.cli._screen import Answer

NAME = "chat"
HELP = "talk with a model; in this process or through a server"
GROUPS = (ModelConfig, EngineConfig, SamplingDefaults, SpeculationConfig, KernelConfig, KvConfig, ClientConfig)
COMMANDS = {
    "/system TEXT": "set the system message and start again; without TEXT show it",
    "/reset": "forget the conversation",
    "/help": "show this",
    "/exit": "leave; so does end of input",
}
HISTORY_LINES = 1000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--system", metavar="TEXT", help="a system message")
    parser.add_argument("--seed", type=int, metavar="N", help="seed of the sampling")


class Conversation:
    """The turns so far, and what the commands do to them."""

    def __init__(self, system: str | None) -> None:
        self.system = system
        self.turns: list[dict[str, Any]] = []

    @property
    def messages(self) -> list[dict[str, Any]]:
        return [*([{"role": "system", "content": self.system}] if self.system else []), *self.turns]

    def asked(self, text: str) -> None:
        self.turns.append({"role": "user", "content": text})

    def answered(self, answer: Answer) -> None:
        """Keep an answer. A broken-off turn without any text is taken back, so that roles go on alternating."""
        if not answer.content and not answer.reasoning and answer.ended is None:
            self.turns.pop()
            return
        turn: dict[str, Any] = {"role": "assistant", "content": answer.content}
        if answer.reasoning:
            turn["reasoning_content"] = answer.reasoning
        self.turns.append(turn)

    def command(self, line: str) -> str | None:
        """Carry out a command; what to print, or None to leave."""
        name, _, rest = line.partition(" ")
        if name in ("/exit", "/quit"):
            return None
        if name == "/reset":
            self.turns.clear()
            return "The conversation starts again."
        if name == "/system":
            if not rest.strip():
                return f"System message: {self.system or 'none'}"
            self.system = rest.strip()
            self.turns.clear()
            return "System message set; the conversation starts again."
        if name == "/help":
            return "\n".join(f"{command:14} {meaning}" for command, meaning in COMMANDS.items())
        return f"There is no command {name}; /help lists them."


def run(args: argparse.Namespace) -> int:
    from gnomon.cli._screen import Screen
    from gnomon.cli._talk import Ask, open_partner

    config: Config = args.config
    ask = Ask(config.sampling.max_tokens, (), args.seed)
    screen = Screen()
    conversation = Conversation(args.system)
    interactive = sys.stdin.isatty()
    failed = False
    with closing(open_partner(config)) as partner:
        if interactive:
            screen.err.print(f"Talking with {partner.model}. /help lists the commands.", style="dim", markup=False)
        with _history(config.paths.cache / "chat_history") if interactive else contextlib.nullcontext():
            for line in _lines(interactive):
                if line.startswith("/"):
                    said = conversation.command(line)
                    if said is None:
                        break
                    screen.err.print(said, style="dim", markup=False)
                    continue
                conversation.asked(line)
                try:
                    answer = screen.show(partner.chat(conversation.messages, ask))
                except CommandError as e:
                    # One turn failed; the conversation before it is still good.
                    conversation.turns.pop()
                    screen.err.print(f"gnomon: {e}", style="red", markup=False)
                    failed = True
                    continue
                failed = False
                conversation.answered(answer)
    return 1 if failed and not interactive else 0


def _lines(interactive: bool) -> Iterator[str]:
    """What the user writes, line by line, without blank ones; Ctrl-C clears the line, end of input ends."""
    while True:
        try:
            line = input("> " if interactive else "").strip()
        except EOFError:
            if interactive:
                print()
            return
        except KeyboardInterrupt:
            if not interactive:
                raise
            print()
            continue
        if line:
            yield line


@contextlib.contextmanager
def _history(path: Path) -> Generator[None]:
    """Line editing with the lines of earlier conversations, where Python has readline."""
    try:
        import readline
    except ImportError:
        yield
        return
    with contextlib.suppress(OSError):
        readline.read_history_file(path)
    readline.set_history_length(HISTORY_LINES)
    try:
        yield
    finally:
        # Lost history is no reason to fail.
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            readline.write_history_file(path)
            path.chmod(0o600)
