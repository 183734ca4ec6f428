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
        # Where a conversation is shortened; for models it doesn't know it assumes a million tokens.
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(served.context),
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
    start = f"codex -c model_provider=gnomon -c model_context_window={served.context} -m {shlex.quote(served.model)}"
    if served.key is not None:
        lines.append(f'env_key = "{VARIABLE}"')
        start = _exported(served, start)
    return Setup("toml", start, ".codex/config.toml", text="\n".join(lines))


def opencode(served: Served) -> Setup:
    # https://opencode.ai/docs/providers/: a custom provider. Without `limit` it would never shorten a conversation.
    limit = {"context": served.context, "output": min(32_000, served.context // 2)}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "Gnomon",
        "options": {"baseURL": served.v1, "apiKey": f"{{env:{VARIABLE}}}"},
        "models": {served.model: {"name": served.model, "tool_call": True, "reasoning": True, "limit": limit}},
    }
    value = {"$schema": "https://opencode.ai/config.json", "provider": {"gnomon": provider}}
    start = _exported(served, f"opencode -m {shlex.quote(f'gnomon/{served.model}')}")
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
    start = "cn --config ~/.continue/config.yaml\n# or in an editor: reload its window"
    return Setup("yaml", start, ".continue/config.yaml", text="\n".join(lines))


def cline(served: Served) -> Setup:
    # https://docs.cline.bot/provider-config/openai-compatible; keys lie in the editor's secret storage. The command line has a verb for it.
    lines = (
        "API Provider: OpenAI Compatible",
        f"Base URL:     {served.v1}",
        f"API Key:      {served.sent_key}",
        f"Model ID:     {served.model}",
    )
    sent = (("-k", served.sent_key), ("-m", served.model), ("-b", served.v1))
    start = "cline auth -p openai " + " ".join(f"{flag} {shlex.quote(value)}" for flag, value in sent) + "\ncline"
    said = "# in an editor: enter these in Cline's settings (the gear); on the command line:\n"
    return Setup("steps", said + start, text="\n".join(lines))


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
    model = {
        "id": served.model,
        "name": f"{served.model} (Gnomon)",
        "baseUrl": served.v1,
        "envKey": VARIABLE,
        "generationConfig": {"contextWindowSize": served.context},
    }
    # Which provider's models are meant is asked on the command line: in the file it would change what is used without it.
    start = _exported(served, f"qwen --auth-type openai --model {shlex.quote(served.model)}")
    return Setup("json", start, ".qwen/settings.json", {"modelProviders": {"openai": [model]}})


def goose(served: Served) -> Setup:
    # https://goose-docs.ai/docs/getting-started/providers: custom providers, a file each.
    value = {
        "name": "gnomon",
        "engine": "openai",
        "display_name": "Gnomon",
        "description": "Gnomon",
        "api_key_env": VARIABLE,
        "base_url": f"{served.v1}/chat/completions",
        "models": [{"name": served.model, "context_limit": served.context}],
        "supports_streaming": True,
    }
    start = _exported(served, f"goose session --provider gnomon --model {shlex.quote(served.model)}")
    return Setup("json", start, ".config/goose/custom_providers/gnomon.json", value)


def mistral_vibe(served: Served) -> Setup:
    # https://github.com/mistralai/mistral-vibe README.md: providers and models of config.toml.
    lines = (
        "[[providers]]",
        'name = "gnomon"',
        f"api_base = {_quoted(served.v1)}",
        f'api_key_env_var = "{VARIABLE}"',
        'api_style = "openai"',
        'backend = "generic"',
        "",
        "[[models]]",
        f"name = {_quoted(served.model)}",
        'provider = "gnomon"',
        'alias = "gnomon"',
        f"max_context_length = {served.context}",
    )
    start = _exported(served, "VIBE_ACTIVE_MODEL=gnomon vibe")
    return Setup("toml", start, ".vibe/config.toml", text="\n".join(lines))


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
    "goose": goose,
    "mistral-vibe": mistral_vibe,
    "opencode": opencode,
    "pi": pi,
    "qwen-code": qwen_code,
    "zed": zed,
}
