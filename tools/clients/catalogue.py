"""The clients: where each comes from, what it must be told, and the command that runs one task.

`settings` are files under the client's home or, with a leading "./", in the folder that it works in; `{url}`,
`{model}` and `{work}` are filled in. docs/clients.md shows the same settings.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tools.clients.install import Package

KEY = "none"  # most clients insist on sending one
TASK = (
    "The function in {work}/adder.py subtracts, but it should add. Mend it, then run "
    "`python3 {work}/check.py` and tell me what it prints."
)


@dataclass(frozen=True, kw_only=True)
class Client:
    """One client. `reports` is False for one that does not print the model's last words."""

    name: str
    package: Package
    command: tuple[str, ...]
    settings: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    protocol: str = "/v1/chat/completions"
    reports: bool = True


def filled(text: str, values: Mapping[str, str]) -> str:
    """`text` with `{url}`, `{model}` and the like in place; other braces stay."""
    return re.sub(r"\{(\w+)\}", lambda found: values.get(found[1], found[0]), text)


def _json(value: Any) -> str:
    return json.dumps(value, indent=2) + "\n"


OPENCODE = Client(
    name="opencode",
    package=Package("npm", "opencode-ai", "1.18.33"),
    command=("opencode", "run", "{task}"),
    settings={
        "./opencode.json": _json(
            {
                "$schema": "https://opencode.ai/config.json",
                "enabled_providers": ["headrace"],
                "provider": {
                    "headrace": {
                        "npm": "@ai-sdk/openai-compatible",
                        "name": "headrace",
                        "options": {"baseURL": "{url}/v1", "apiKey": KEY},
                        "models": {
                            "{model}": {
                                "name": "North Mini Code",
                                "tool_call": True,
                                "reasoning": True,
                                "limit": {"context": 131072, "output": 16384},
                            }
                        },
                    }
                },
                "model": "headrace/{model}",
                "small_model": "headrace/{model}",
            }
        )
    },
    environment={"OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_DISABLE_AUTOUPDATE": "1"},
)

OPENAI_SDK = Client(
    name="openai-sdk",
    package=Package("pip", "openai", "3.57.0"),
    command=("python", "{tools}/agent.py", "openai", "{task}"),
    environment={"OPENAI_BASE_URL": "{url}/v1", "OPENAI_API_KEY": KEY, "MODEL": "{model}"},
)

LITELLM = Client(
    name="litellm",
    package=Package("pip", "litellm", "1.110.2"),
    command=("python", "{tools}/agent.py", "litellm", "{task}"),
    environment={
        "HOSTED_VLLM_API_BASE": "{url}/v1",
        "HOSTED_VLLM_API_KEY": KEY,
        "MODEL": "hosted_vllm/{model}",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    },
)

AIDER = Client(
    name="aider",
    package=Package("pip", "aider-chat", "0.86.2"),
    command=(
        *("aider", "--model", "openai/{model}", "--edit-format", "diff", "--yes-always", "--no-git"),
        *(
            "--no-check-update",
            "--no-show-model-warnings",
            "--no-analytics",
            "--no-detect-urls",
            "--map-tokens",
            "0",
        ),
        *("--test-cmd", "python3 check.py", "--auto-test", "--message", "{task}", "adder.py"),
    ),
    environment={
        "OPENAI_API_BASE": "{url}/v1",
        "OPENAI_API_KEY": KEY,
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    },
    reports=False,
)

MINI_SWE_AGENT = Client(
    name="mini-swe-agent",
    package=Package("pip", "mini-swe-agent", "2.4.6"),
    command=(
        "mini",
        "-m",
        "openai/{model}",
        "-t",
        "{task}",
        "-y",
        "--exit-immediately",
        "-o",
        "{home}/out.json",
    ),
    environment={
        "OPENAI_API_BASE": "{url}/v1",
        "OPENAI_API_KEY": KEY,
        "MSWEA_COST_TRACKING": "ignore_errors",
        "MSWEA_CONFIGURED": "true",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    },
)

PI = Client(
    name="pi",
    package=Package("npm", "@mariozechner/pi-coding-agent", "0.73.1", node=20),
    command=("pi", "--provider", "headrace", "--model", "{model}", "-p", "{task}"),
    settings={
        ".pi/agent/models.json": _json(
            {
                "providers": {
                    "headrace": {
                        "baseUrl": "{url}/v1",
                        "api": "openai-completions",
                        "apiKey": KEY,
                        "models": [
                            {"id": "{model}", "reasoning": True, "contextWindow": 131072, "maxTokens": 16384}
                        ],
                    }
                }
            }
        )
    },
    environment={"PI_OFFLINE": "1"},
)

QWEN_CODE = Client(
    name="qwen-code",
    package=Package("npm", "@qwen-code/qwen-code", "0.24.4", node=22),
    command=("qwen", "--auth-type", "openai", "--yolo", "-p", "{task}"),
    environment={"OPENAI_BASE_URL": "{url}/v1", "OPENAI_API_KEY": KEY, "OPENAI_MODEL": "{model}"},
)

CLAUDE_CODE = Client(
    name="claude-code",
    package=Package("npm", "@anthropic-ai/claude-code", "2.1.332", node=22),
    command=("claude", "-p", "{task}", "--allowedTools", "Read,Edit,Write,Bash"),
    environment={
        "ANTHROPIC_BASE_URL": "{url}",
        "ANTHROPIC_AUTH_TOKEN": KEY,
        "ANTHROPIC_MODEL": "{model}",
        "ANTHROPIC_SMALL_FAST_MODEL": "{model}",
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": "131072",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    },
    protocol="/v1/messages",
)

CODEX = Client(
    name="codex",
    package=Package("npm", "@openai/codex", "0.171.0"),
    command=("codex", "exec", "--skip-git-repo-check", "--sandbox", "danger-full-access", "{task}"),
    settings={
        ".codex/config.toml": "\n".join(
            (
                'model = "{model}"',
                'model_provider = "headrace"',
                "model_context_window = 131072",
                "",
                "[model_providers.headrace]",
                'name = "headrace"',
                'base_url = "{url}/v1"',
                'wire_api = "responses"',
                'env_key = "HEADRACE_API_KEY"',
                "",
            )
        )
    },
    environment={"HEADRACE_API_KEY": KEY},
    protocol="/v1/responses",
)

CLIENTS = (*(OPENCODE, OPENAI_SDK, LITELLM, AIDER, MINI_SWE_AGENT, PI, QWEN_CODE, CLAUDE_CODE, CODEX),)
