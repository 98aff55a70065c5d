"""What the worker that profiles asks of the others, as it travels."""

import json
from dataclasses import asdict, dataclass
from typing import Any, final

from .recording import MAX_BYTES, MIN_BYTES, MOST_BYTES

__all__ = ["SETTINGS", "ProfileRequest", "read_profile_id"]

SETTINGS = ("record_shapes", "profile_memory", "with_stack")
"""The options of torch's profiler that a profile of all workers has; all are off by default."""

MAX_ID_CHARACTERS = 64


def read_profile_id(value: object) -> str:
    """Returns the id of a profile that another worker has sent. Raises ValueError if it is none."""
    if not isinstance(value, str) or not 0 < len(value) <= MAX_ID_CHARACTERS:
        raise ValueError("malformed message: it has no id of a profile")
    return value


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRequest:
    """What a worker is asked to record.

    profile: the id of the profile; the worker that profiles has given it to no other one.
    settings: those of SETTINGS that are on.
    max_bytes: bytes of the JSON of the recording, at most.
    """

    profile: str
    settings: tuple[str, ...] = ()
    max_bytes: int = MAX_BYTES

    def encode(self) -> str:
        """Returns the request as JSON: a text is all that has to be unpickled."""
        return json.dumps(asdict(self))

    @staticmethod
    def decode(value: object) -> "ProfileRequest":
        """Returns the request that another worker has encoded. Raises ValueError if it is malformed."""
        fields: Any = json.loads(value) if isinstance(value, str) else None
        if not isinstance(fields, dict) or fields.keys() != ProfileRequest.__dataclass_fields__.keys():
            raise ValueError("malformed message: it is no beginning of a profile")
        settings, max_bytes = fields["settings"], fields["max_bytes"]
        if not isinstance(settings, list) or not all(each in SETTINGS for each in settings):
            raise ValueError("malformed message: a profile has no such settings")
        if type(max_bytes) is not int or not MIN_BYTES <= max_bytes <= MOST_BYTES:
            raise ValueError(f"malformed message: a recording has {MIN_BYTES} to {MOST_BYTES} bytes")
        profile = read_profile_id(fields["profile"])
        return ProfileRequest(profile=profile, settings=tuple(settings), max_bytes=max_bytes)
