"""What known coding agents want to be told of a server. Each format stands beside the documentation that it was taken from."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

VARIABLE = "GNOMON_API_KEY"
NO_KEY = "none"
"""For agents that insist on a key where the server asks for none."""


@dataclass(frozen=True, slots=True)
class Served:
    """A server as an agent sees it: the address without `/v1`, the model's id, its context in tokens, and the key."""

    url: str
    model: str
    context: int
    key: str | None = None

    @property
    def v1(self) -> str:
        return f"{self.url}/v1"

    @property
    def sent_key(self) -> str:
        return self.key or NO_KEY


@dataclass(frozen=True, slots=True)
class Setup:
    """What one agent's file holds, and how the agent is started with it.

    `value` is merged into a JSON file; `text` is put into a file of another kind. `path` is relative to the home directory; without
    one the agent keeps its settings where only it writes, and `text` says what to enter.
    """

    kind: Literal["json", "toml", "yaml", "steps"]
    start: str
    path: str | None = None
    value: Mapping[str, Any] | None = None
    text: str = ""

    @property
    def shown(self) -> str:
        return self.text if self.value is None else json.dumps(self.value, indent=2, ensure_ascii=False)

    def file(self, home: Path) -> Path | None:
        return None if self.path is None else home / self.path


def _exported(served: Served, command: str) -> str:
    return f"export {VARIABLE}={shlex.quote(served.sent_key)}\n{command}"


def _quoted(text: str) -> str:
    """A double-quoted string of TOML and YAML; `text` holds no control characters."""
    return json.dumps(text, ensure_ascii=False)


def claude_code(served: Served) -> Setup:
    # https://code.claude.com/docs/en/env-vars: `env` of settings.json; the address goes without /v1.
    names = ("ANTHROPIC_MODEL", *(f"ANTHROPIC_DEFAULT_{size}_MODEL" for size in ("OPUS", "SONNET", "HAIKU")))
    env = {
        "ANTHROPIC_BASE_URL": served.url,
        "ANTHROPIC_AUTH_TOKEN": served.sent_key,
        **dict.fromkeys(names, served.model),
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    once = " ".join(f"{name}={shlex.quote(value)}" for name, value in env.items())
    return Setup(
        "json", f"claude\n# or for once, without the file:\n{once} claude", ".claude/settings.json", {"env": env}
    )


def codex(served: Served) -> Setup:
    # https://github.com/openai/codex docs/config.md: model_providers; versions of 2026 take wire_api "responses" only.
    lines = [
        "[model_providers.gnomon]",
        'name = "Gnomon"',
        f"base_url = {_quoted(served.v1)}",
        'wire_api = "responses"',
    ]
    start = f"codex -c model_provider=gnomon -m {shlex.quote(served.model)}"
    if served.key is not None:
        lines.append(f'env_key = "{VARIABLE}"')
        start = _exported(served, start)
    return Setup("toml", start, ".codex/config.toml", text="\n".join(lines))


def opencode(served: Served) -> Setup:
    # https://opencode.ai/docs/providers/: a custom provider.
    provider = {
        "name": "Gnomon",
        "env": [VARIABLE],
        "package": "@opencode/ai/providers/openai-compatible",
        "settings": {"baseURL": served.v1},
        "models": {served.model: {"name": served.model}},
    }
    value = {"$schema": "https://opencode.ai/config.json", "providers": {"gnomon": provider}}
    start = _exported(served, "opencode   # then /models")
    return Setup("json", start, ".config/opencode/opencode.jsonc", value)


def aider(served: Served) -> Setup:
    # https://aider.chat/docs/llms/openai-compat.html: the model's name gets the prefix openai/.
    lines = (
        f"openai-api-base: {_quoted(served.v1)}",
        f"openai-api-key: {_quoted(served.sent_key)}",
        f"model: {_quoted(f'openai/{served.model}')}",
    )
    return Setup("yaml", "aider", ".aider.conf.yml", text="\n".join(lines))


def continue_dev(served: Served) -> Setup:
    # https://docs.continue.dev/customize/model-providers/top-level/openai and /yaml-migration (roles).
    lines = (
        "name: Gnomon",
        "version: 0.0.1",
        "schema: v1",
        "models:",
        f"  - name: {_quoted(served.model)}",
        "    provider: openai",
        f"    model: {_quoted(served.model)}",
        f"    apiBase: {_quoted(served.v1)}",
        f"    apiKey: {_quoted(served.sent_key)}",
        "    roles: [chat, edit, apply]",
    )
    return Setup("yaml", "reload the editor's window", ".continue/config.yaml", text="\n".join(lines))


def cline(served: Served) -> Setup:
    # https://docs.cline.bot/provider-config/openai-compatible; keys lie in the editor's secret storage.
    lines = (
        "API Provider: OpenAI Compatible",
        f"Base URL:     {served.v1}",
        f"API Key:      {served.sent_key}",
        f"Model ID:     {served.model}",
    )
    return Setup("steps", "enter these in Cline's settings (the gear)", text="\n".join(lines))


def zed(served: Served) -> Setup:
    # https://zed.dev/docs/ai/llm-providers#openai-api-compatible: the key comes from PROVIDER_API_KEY or the keychain.
    model = {
        "name": served.model,
        "display_name": served.model,
        "max_tokens": served.context,
        "capabilities": {"tools": True, "images": False, "parallel_tool_calls": True, "prompt_cache_key": False},
    }
    provider = {"api_url": served.v1, "available_models": [model]}
    value = {"language_models": {"openai_compatible": {"Gnomon": provider}}}
    return Setup("json", _exported(served, "zed"), ".config/zed/settings.json", value)


def qwen_code(served: Served) -> Setup:
    # https://qwenlm.github.io/qwen-code-docs/en/users/configuration/model-providers/
    model = {"id": served.model, "name": f"{served.model} (Gnomon)", "baseUrl": served.v1, "envKey": VARIABLE}
    start = _exported(served, f"qwen --model {shlex.quote(served.model)}")
    return Setup("json", start, ".qwen/settings.json", {"modelProviders": {"openai": [model]}})


def pi(served: Served) -> Setup:
    # https://github.com/earendil-works/pi packages/coding-agent/docs/models.md
    provider = {
        "baseUrl": served.v1,
        "api": "openai-completions",
        "apiKey": NO_KEY if served.key is None else f"${VARIABLE}",
        "models": [{"id": served.model, "contextWindow": served.context}],
    }
    start = f"pi --provider gnomon --model {shlex.quote(served.model)}"
    if served.key is not None:
        start = _exported(served, start)
    return Setup("json", start, ".pi/agent/models.json", {"providers": {"gnomon": provider}})


AGENTS: Mapping[str, Callable[[Served], Setup]] = {
    "aider": aider,
    "claude-code": claude_code,
    "cline": cline,
    "codex": codex,
    "continue": continue_dev,
    "opencode": opencode,
    "pi": pi,
    "qwen-code": qwen_code,
    "zed": zed,
}
