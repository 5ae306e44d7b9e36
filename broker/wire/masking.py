"""Addresses in logs and errors, without the passwords that may be in them. Pure.

It works on the text alone and not on what a parser makes of it, since it must hide a password in what is no address
too: a wrong address stands in the error that refuses it. Where a password might reach farther than it seems to, as
with an @ behind a question mark, nothing but the scheme is shown.
"""

from __future__ import annotations

import re

HIDDEN = "***"

#: A place without a password: a host, perhaps with a port or a database, or a path.
_HOST = r"(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]*(?:%\w+)?\]?)(?::\d{0,5})?"
_PLACE = re.compile(rf"(?:{_HOST})?(?:/[^@?#]*)?", re.ASCII)
#: Several of them, behind Sentinel alone.
_PLACES = re.compile(rf"(?:{_HOST})?(?:,{_HOST})*(?:/[^@?#]*)?", re.ASCII)
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_OPTION = re.compile(
    r"(?P<name>db|protocol|(?:sentinel_)?password_file|ssl_(?!password)\w+)=[^@#&]*|(?P<other>\w+)=.*",
    re.ASCII | re.DOTALL,
)
_PASSWORD = re.compile(r"(password=).*", re.DOTALL)
#: What tells that an address may have a password in it.
_MAY_HIDE = re.compile(r"[@?]|^(?:rediss?(?:\+sentinel)?|unix)://")


def shown(address: str) -> str:
    """Returns an address without what may be a user or a password in it."""
    match = _SCHEME.match(address)
    scheme = match[0] if match else ""
    head, mark, query = address[len(scheme) :].partition("?")
    _, at, place = head.rpartition("@")
    form = _PLACES if scheme.lower().endswith("+sentinel://") else _PLACE
    if "@" in query or "#" in address or not form.fullmatch(place):
        return scheme + HIDDEN
    options = "&".join(map(_option, query.split("&")))
    return f"{scheme}{HIDDEN + at if at else ''}{place}{mark}{options if mark else ''}"


def masked(text: str) -> str:
    """Returns a text with the address in it, if there is one, as :func:`shown` shows it."""
    match = _SCHEME.search(text)
    if match is None:  # a part of an address, perhaps
        return _PASSWORD.sub(rf"\1{HIDDEN}", text)
    if not _MAY_HIDE.search(text[match.start() :]):
        return text
    return text[: match.start()] + shown(text[match.start() :])


def _option(text: str) -> str:
    match = _OPTION.fullmatch(text)
    if match is None:
        return HIDDEN
    return text if match["name"] else f"{match['other']}={HIDDEN}"
