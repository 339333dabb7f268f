"""The Hugging Face hub: whether it answers, found out once. Its own client asks six times for every file, with pauses."""

from __future__ import annotations

from functools import cache


@cache
def silence() -> str:
    """Why the hub does not answer, "" if it does. Where it does not, this process goes on with the hub's local cache alone.

    One question for a process, before its first file. Large downloads keep the client's own patience.
    """
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set, so only its local cache is used"
    try:
        get_session().head(constants.ENDPOINT, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except Exception as error:  # no name, no route, no certificate, no proxy: the client has a class for each
        constants.HF_HUB_OFFLINE = True
        return f"{constants.ENDPOINT} does not answer ({str(error) or type(error).__name__})"
    return ""
