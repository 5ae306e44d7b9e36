"""One prefix of an object store, by ``obstore``: S3, Google, Azure and a folder alike. Shell.

Every call blocks, is bounded in time, and raises :class:`~broker.base.errors.Unavailable` with a cure when the other
side does not do its part: the library repeats what a server or the network failed at, a few times, ever more slowly.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from copy import copy
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from aggregator.interface.place import Place, place_of
from broker.base.errors import ConfigError, Unavailable, cure_of
from broker.process.release import install

#: A request that takes longer is given up, and repeated. A part of a large object is one request.
REQUEST_S, CONNECT_S = 60.0, 5.0
#: Attempts for one request, besides the first, and the seconds after which there are no more.
RETRIES, RETRY_S = 4, 30.0
#: Large objects travel in such parts, so many at a time: enough for a fast line, and little memory.
PART_BYTES, PARTS_AT_ONCE = 8 << 20, 2

#: What servers call it when the bucket is not there, or the container: that is no missing object.
_NO_BUCKET = re.compile(r"NoSuchBucket|ContainerNotFound|specified (?:bucket|container) does not exist")
_DENIED = re.compile(r"status code: 40[13]\b")
#: Variables that say where a server listens.
_ENDPOINTS = ("AWS_ENDPOINT_URL", "AZURE_STORAGE_ENDPOINT", "GOOGLE_BASE_URL")


class AlreadyThere(Exception):
    """An object that was to be new exists."""


class Bucket:
    """Objects below one prefix; names are relative to it."""

    def __init__(self, store: Any, place: Place) -> None:
        import obstore

        self._api = obstore
        self._store = store
        self._prefix = ""
        self.url = place.url  #: to be shown

    def below(self, folder: str) -> Bucket:
        """Returns a folder in it, which ends with a slash; nothing is this one itself."""
        inner = copy(self)
        inner._prefix = self._prefix + folder
        inner.url = f"{self.url}/{folder}".rstrip("/")
        return inner

    @classmethod
    def open(cls, text: str, name: str = "copy_to", *, create: bool = True) -> Bucket:
        """Returns the prefix that an address names. Nothing is asked of a server yet.

        Args:
            text: The address (:mod:`aggregator.interface.place`).
            name: Of the setting, for errors.
            create: Make a folder of this machine where there is none.

        Raises:
            ConfigError: The address cannot work, or the library is not installed.
            Unavailable: A folder cannot be made, or is not there.
        """
        place = place_of(text, name)
        try:
            from obstore.exceptions import BaseError
            from obstore.store import LocalStore, from_url
        except ImportError as err:
            raise ConfigError(name, text, f"needs a library: {install('obstore')}") from err
        backoff = {"init_backoff": timedelta(seconds=0.2), "max_backoff": timedelta(seconds=5), "base": 2}
        retries: Any = {"max_retries": RETRIES, "retry_timeout": timedelta(seconds=RETRY_S), "backoff": backoff}
        client: Any = {"timeout": timedelta(seconds=REQUEST_S), "connect_timeout": timedelta(seconds=CONNECT_S)}
        # What the library reads by itself is the address alone; that it may do without TLS it must be told.
        if place.plain_http or any(os.environ.get(each, "").startswith("http://") for each in _ENDPOINTS):
            client["allow_http"] = True
        options: Any = place.options
        try:
            if place.is_folder:
                folder = Path(unquote(urlsplit(place.url).path))
                if not create and not folder.is_dir():
                    raise ConfigError(name, text, "is no folder on this machine: check the path")
                folder.mkdir(parents=True, exist_ok=True)
                return cls(LocalStore(folder), place)
            return cls(from_url(place.url, client_options=client, retry_config=retries, **options), place)
        except OSError as err:
            raise Unavailable(f"cannot make {place.url}: {err.strerror}; {cure_of(err)}", definite=True) from err
        except (BaseError, ValueError) as err:
            cure = "; set AZURE_STORAGE_ACCOUNT_NAME" if "Account must be specified" in str(err) else ""
            raise ConfigError(name, text, f"cannot be used: {_brief(err)}{cure}") from err

    def list(self, prefix: str = "") -> dict[str, int]:
        """Returns name -> size in bytes of every object whose name begins so."""
        with self._mapped("list"):
            found: dict[str, int] = {}
            for chunk in self._api.list(self._store, (self._prefix + prefix).rstrip("/") or None):
                found |= {each["path"][len(self._prefix) :]: each["size"] for each in chunk}
            return found

    def put(self, key: str, content: bytes | Path, *, new: bool = False) -> None:
        """Puts an object there, whole or not at all.

        Args:
            key: Its name.
            content: Bytes, or the path of a file, which is read as it is sent.
            new: Refuse to replace one.

        Raises:
            AlreadyThere: There is one, and ``new`` was asked for.
        """
        from obstore.exceptions import AlreadyExistsError

        with self._mapped(f"write {key} to"):
            try:
                self._api.put(
                    self._store,
                    self._prefix + key,
                    content,
                    mode="create" if new else "overwrite",
                    chunk_size=PART_BYTES,
                    max_concurrency=PARTS_AT_ONCE,
                )
            except AlreadyExistsError as err:
                raise AlreadyThere(key) from err

    def get(self, key: str) -> Iterator[memoryview]:
        """Yields the content of an object, piece by piece; raises FileNotFoundError where there is none."""
        with self._mapped(f"read {key} from", missing=True):
            for piece in self._api.get(self._store, self._prefix + key).stream(min_chunk_size=PART_BYTES):
                yield memoryview(piece)

    def read(self, key: str) -> bytes:
        """Returns the content of a small object; raises FileNotFoundError where there is none."""
        return b"".join(self.get(key))

    def delete(self, keys: Iterable[str]) -> None:
        """Removes objects, in any order; those that are not there are no error."""
        for key in keys:
            with suppress(FileNotFoundError), self._mapped(f"remove {key} from", missing=True):
                self._api.delete(self._store, self._prefix + key)

    @contextmanager
    def _mapped(self, what: str, *, missing: bool = False) -> Iterator[None]:
        """Turns errors of the library into Unavailable, with the operation and the cure."""
        from obstore.exceptions import BaseError, PermissionDeniedError, UnauthenticatedError

        try:
            yield
        except FileNotFoundError as err:
            if missing and not _NO_BUCKET.search(str(err)):
                raise
            cure = "make the bucket or container, or correct the address"
            raise Unavailable(f"cannot {what} {self.url}: {_brief(err)}; {cure}", definite=True) from err
        except (BaseError, OSError, ValueError) as err:
            denied = isinstance(err, PermissionDeniedError | UnauthenticatedError) or _DENIED.search(str(err))
            cure = "check credentials and rights" if denied else "check address, network and credentials"
            if _NO_BUCKET.search(str(err)):
                cure = "make the bucket or container, or correct the address"
            raise Unavailable(f"cannot {what} {self.url}: {_brief(err)}; {cure}", definite=False) from err


def _brief(err: BaseException) -> str:
    """Returns the sentence of a library error, without its requests, inner state and server's XML."""
    text = re.sub(r"\s+", " ", str(err).partition("\n\nDebug source")[0])
    code = re.search(r"<Code>(\w+)</Code>", text)
    sentence = text.partition("<?xml")[0]
    sentence = re.sub(
        r"Generic \w+ error: |Error performing [\w ]+ request: |, max_retries: \d+|, retry_timeout: \w+", "", sentence
    )
    sentence = re.sub(r"\?list-type=\S+", "", sentence).replace("Error performing ", "").rstrip(" :")
    return (sentence[:240] + (f" ({code[1]})" if code else "")).rstrip(" :")
