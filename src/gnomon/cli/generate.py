"""`gnomon generate`: one answer, streamed."""

from __future__ import annotations

import argparse
import sys
from contextlib import closing

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

NAME = "generate"
ALIASES = ("gen",)
HELP = "answer one prompt, streaming; in this process or from a server"
GROUPS = (ModelConfig, EngineConfig, SamplingDefaults, SpeculationConfig, KernelConfig, KvConfig, ClientConfig)
MAX_TOKENS = 256


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-p", "--prompt", metavar="TEXT", help="the prompt; without it stdin is read")
    parser.add_argument("--system", metavar="TEXT", help="a system message before it")
    parser.add_argument("--raw", action="store_true", help="continue the prompt as it is, without the chat template")
    parser.add_argument("--seed", type=int, metavar="N", help="seed of the sampling")
    parser.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="stop before this text; may be repeated"
    )


def run(args: argparse.Namespace) -> int:
    from gnomon.cli._screen import Screen
    from gnomon.cli._talk import Ask, open_partner

    config: Config = args.config
    if args.raw and args.system is not None:
        raise CommandError("--system needs the chat template, which --raw leaves out", 2)
    prompt = _prompt(args.prompt)
    ask = Ask(config.sampling.max_tokens or MAX_TOKENS, tuple(args.stop), args.seed)
    messages = [{"role": "system", "content": args.system}] if args.system is not None else []
    messages.append({"role": "user", "content": prompt})
    screen = Screen()
    with closing(open_partner(config)) as partner:
        answer = screen.show(partner.complete(prompt, ask) if args.raw else partner.chat(messages, ask))
    screen.summary(answer)
    return 130 if answer.ended is None else 0


def _prompt(given: str | None) -> str:
    if given is None and sys.stdin.isatty():
        raise CommandError("there is no prompt: give --prompt TEXT, or pipe it in", 2)
    text = sys.stdin.read() if given is None else given
    if not text.strip():
        raise CommandError("the prompt is empty", 2)
    return text
