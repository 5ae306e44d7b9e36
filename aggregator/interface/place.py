"""An object store's address: ``s3://bucket/prefix``, ``gs://``, ``az://``, ``file:///path``. Pure.

Credentials never stand in it: they come from the environment, by the usual names (``AWS_ACCESS_KEY_ID`` and so on), or
from the machine's role. Of a server that speaks S3 without being Amazon's, ``?endpoint=http://host:9000`` says where it
listens, or the variable ``AWS_ENDPOINT_URL``. The same is there for the other two, for clouds of one's own and tests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import parse_qsl, urlsplit

from broker.base.errors import ConfigError

SCHEMES = ("s3", "gs", "az", "file")
_EXAMPLE = "s3://bucket/run"
#: What may follow the question mark -> what the library calls it.
_OPTIONS = {
    "s3": {"endpoint": "aws_endpoint", "region": "aws_region"},
    "gs": {"endpoint": "google_base_url"},
    "az": {"endpoint": "azure_storage_endpoint"},
    "file": {},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A prefix in an object store.

    Attributes:
        url: Without options.
        options: For the library.
        plain_http: Whether it is reached without TLS, which the library must be told.
    """

    url: str
    options: Mapping[str, str] = field(default_factory=dict)
    plain_http: bool = False

    @property
    def is_folder(self) -> bool:
        """True for a folder on this machine (``file:``), False for an object store."""
        return self.url.startswith("file:")


def place_of(text: str, name: str = "copy_to") -> Place:
    """Returns the place that an address names.

    Args:
        text: The address.
        name: Of the setting, for the error.

    Raises:
        ConfigError: It is no address of an object store.
    """
    parts = urlsplit(text)
    if parts.scheme not in SCHEMES:
        cure = f"must begin with {', '.join(f'{each}://' for each in SCHEMES)}, such as {_EXAMPLE}"
        raise ConfigError(name, text, cure)
    if parts.username is not None or parts.password is not None:
        cure = "must not hold a password: give it by the environment, such as AWS_ACCESS_KEY_ID"
        raise ConfigError(name, text, cure)
    if parts.scheme == "file":
        if parts.netloc or not parts.path.startswith("/") or parts.path == "/":
            raise ConfigError(name, text, "must be file:// and an absolute path, such as file:///mnt/copies/run")
    elif not parts.netloc:
        raise ConfigError(name, text, f"names no bucket: must be like {_EXAMPLE}")
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    known = _OPTIONS[parts.scheme]
    unknown = sorted(options.keys() - known.keys())
    if unknown:
        there = f"options of {parts.scheme}:// are {' and '.join(known) or 'none'}"
        raise ConfigError(name, text, f"has an unknown option {unknown[0]!r}: {there}")
    return Place(
        url=f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}",
        options={known[key]: value for key, value in options.items()},
        plain_http=options.get("endpoint", "").startswith("http://"),
    )
