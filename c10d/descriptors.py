"""How many connections a listener takes, so that strangers leave file descriptors to the rest of the process."""

import resource

__all__ = ["half_of_descriptors"]


def half_of_descriptors(most: int) -> int:
    """Returns `most`, or half of the file descriptors that this process may have if that is less."""
    descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return most if descriptors == resource.RLIM_INFINITY else min(most, max(1, descriptors // 2))
