"""Whether calls are traced with OpenTelemetry: the option `otel`."""

import os
from collections.abc import Mapping
from typing import Any

__all__ = ["OTEL_VARIABLE", "check_otel", "otel_from_environment"]

OTEL_VARIABLE = "GRADWIRE_OTEL"


def otel_from_environment(environment: Mapping[str, str] = os.environ) -> bool:
    """Returns whether GRADWIRE_OTEL is 1. Raises ValueError if it is neither that nor 0."""
    text = environment.get(OTEL_VARIABLE, "")
    if text not in {"", "0", "1"}:
        raise ValueError(f"{OTEL_VARIABLE} is {text!r}: give 1 or 0")
    return text == "1"


def check_otel(value: Any) -> Any:
    """Returns the value of the option. Raises TypeError if it is none."""
    if value is not None and not isinstance(value, bool):
        raise TypeError(f"otel is {value!r}: give True or False, or None for what {OTEL_VARIABLE} says")
    return value
