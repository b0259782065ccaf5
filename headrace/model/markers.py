"""The marker tokens of North's chat format.

A checkpoint may or may not register some of them as special tokens, and their ids differ between checkpoints:
look them up by name and compare text, never numbers.
"""

from __future__ import annotations

PAD = "<PAD>"
BOS = "<BOS_TOKEN>"
START_OF_TURN = "<|START_OF_TURN_TOKEN|>"
END_OF_TURN = "<|END_OF_TURN_TOKEN|>"
SYSTEM = "<|SYSTEM_TOKEN|>"
USER = "<|USER_TOKEN|>"
CHATBOT = "<|CHATBOT_TOKEN|>"
START_THINKING = "<|START_THINKING|>"
END_THINKING = "<|END_THINKING|>"
START_TEXT = "<|START_TEXT|>"
END_TEXT = "<|END_TEXT|>"
START_ACTION = "<|START_ACTION|>"
END_ACTION = "<|END_ACTION|>"
START_TOOL_RESULT = "<|START_TOOL_RESULT|>"
END_TOOL_RESULT = "<|END_TOOL_RESULT|>"

MARKERS = (
    BOS,
    START_OF_TURN,
    END_OF_TURN,
    SYSTEM,
    USER,
    CHATBOT,
    START_THINKING,
    END_THINKING,
    START_TEXT,
    END_TEXT,
    START_ACTION,
    END_ACTION,
    START_TOOL_RESULT,
    END_TOOL_RESULT,
)
