"""The host side of a fragment: its reference values, and pseudo-gradients from them. Pure.

With local parameters L, reference r and global parameters Theta, tensor by tensor, r and Theta in float32:

    capture    Delta = r - L                     r <- r - decode(encode(Delta))         (error feedback)
    adopt      shift = Theta - keep * r          L' = round(keep * L + shift)          r <- keep * r + shift
               in narrow dtypes                                                        r <- L' - keep * (L - r)

L - r is the island's progress: what it trained and has not handed over, with what the codec rounded away before. That
the codec's errors stay in it is error feedback, and needs no buffer of its own: after any number of captures, what was
handed over differs from what was trained by one rounding, not by the sum of all. Without it (``feedback=False``, for
the laboratory's comparison) r <- L, and what was rounded away is lost.

In float32 the reference is moved by the sum that moves the parameters: without training L = r, and so L' = r'
and a pseudo-gradient of exactly zero. Of other progress each adoption rounds away a unit in the last place. (With
0 < keep < 1 a device may fuse the product into the sum; the two results then agree to the last bit but one.)

*What a cast rounds away on installing is not progress.* In a dtype that is narrower than float32, such as bfloat16, L'
misses Theta + keep * (L - r) by a large rounding error e, which would be handed over with the next capture, as if the
island had trained it. The last formula gives r = Theta + e: r follows what L' really holds, progress is to the last bit
what it was, and the next shift, Theta' - r, takes e back again. Rounding errors neither travel nor add up.

L' is needed for that on the host, where it is computed a second time from the L that was there before: the sum and the
cast are single IEEE operations, so both results agree.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Final, cast

import ml_dtypes
import numpy as np
import numpy.typing as npt
import xxhash

from broker.base.errors import ConfigError, LocalProtocolError, RemoteProtocolError
from broker.wire.fragments import FragmentManifest, Kind, Region, TensorSpec, tensor_of
from broker.wire.frames import verify
from broker.wire.messages import Codec, Encoded, Envelope, Place, Reason, Version
from broker.wire.tensors import (
    Float32Array,
    added,
    check_payload,
    decode_into,
    decode_tensor,
    encode_tensor,
    encode_vector,
    fragment_digest,
)

Array = npt.NDArray[Any]

#: Below this float32 holds every integer.
_EXACT: Final = 1 << 24
#: Elements worked on together: temporaries of 256 KB stay in the second-level cache.
_BLOCK: Final = 65_536
_FLOAT32 = frozenset({Codec.F32})


def wide_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Returns the dtype in which parameters of ``dtype`` are shifted: float32, or float64 for float64."""
    return np.dtype(np.float64 if dtype == np.float64 else np.float32)


def is_narrow(dtype: np.dtype[Any]) -> bool:
    """Returns whether ``dtype`` has fewer bits than float32, so that adopting a version rounds."""
    return wide_dtype(dtype) != dtype


def adopted(local: Any, shift: Any, keep: float) -> Any:
    """Returns ``keep * local + shift`` in the dtype of ``local``.

    Args:
        local: Parameters, as a numpy array, or a JAX array or tracer.
        shift: In :func:`wide_dtype`, of the same shape and sort.
        keep: In (0, 1].
    """
    wide = local.astype(shift.dtype)
    return ((wide if keep == 1 else keep * wide) + shift).astype(local.dtype)


def encode_seed(tensors: Sequence[TensorSpec], initial: Sequence[Array]) -> tuple[Encoded, ...]:
    """Returns a fragment of version 0 in its wire form: float32 copies of the initial parameters.

    Raises:
        ConfigError: One of them is not finite: the run could never begin. Or a frozen one has integers that float32
            would round.
        LocalProtocolError: A shape has changed.
    """
    _check(tensors, initial)
    with np.errstate(over="ignore"):
        wide = [np.array(leaf, np.float32, order="C") for leaf in initial]
    for tensor, leaf, given in zip(tensors, wide, initial, strict=True):
        unfit = leaf.size - int(np.count_nonzero(np.isfinite(leaf)))
        if unfit:
            what = f"{unfit} of its {leaf.size} initial values are not finite in float32"
            cure = "make it local (kinds)" if tensor.kind is Kind.FROZEN else "look at init"
            raise ConfigError("params", tensor_of(tensor.name), f"{what}, and a run cannot begin with them: {cure}")
        if given.dtype.kind in "iu" and given.dtype.itemsize > 2 and np.any(np.abs(leaf) >= _EXACT):
            cure = "numbers travel in float32, which rounds integers that are as large: make it local (kinds)"
            raise ConfigError("params", tensor_of(tensor.name), cure)
    return tuple(encode_tensor(leaf, Codec.F32) for leaf in wide)


def cut(payload: Sequence[Encoded], regions: Sequence[tuple[int, Region]]) -> tuple[Encoded, ...]:
    """Returns regions of a fragment's tensors, in float32.

    Args:
        payload: One buffer per tensor.
        regions: Each with the number of its tensor.
    """
    whole = [decode_tensor(encoded) for encoded in payload]
    return tuple(encode_tensor(np.ascontiguousarray(whole[i][region.slices]), Codec.F32) for i, region in regions)


class Parts:
    """This host's part of a fragment's tensors: all of them, or some regions.

    Args:
        regions: Each with the number of its tensor; None: every tensor is whole here.
        handed: For each region, whether this host hands it over.
    """

    def __init__(self, regions: Sequence[tuple[int, Region]] | None = None, handed: Sequence[bool] = ()) -> None:
        self._regions, self._handed = regions, handed

    def tensors(self, specs: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
        """Returns one entry for each array on this host, from entries of the whole tensors."""
        if self._regions is None:
            return tuple(specs)
        return tuple(replace(specs[i], shape=region.shape) for i, region in self._regions)

    def cut(self, payload: Sequence[Encoded]) -> tuple[Encoded, ...]:
        """Returns this host's part of a fragment's whole tensors; regions in float32."""
        return tuple(payload) if self._regions is None else cut(payload, self._regions)

    def handed(self, payload: Sequence[Encoded]) -> tuple[tuple[Encoded, ...], tuple[Place, ...]]:
        """Returns the arrays that this host hands over, and their places; no places for whole tensors."""
        if self._regions is None:
            return tuple(payload), ()
        rows = zip(self._regions, payload, self._handed, strict=True)
        own = [(encoded, Place(tensor=i, start=region.start)) for (i, region), encoded, ours in rows if ours]
        return tuple(encoded for encoded, _ in own), tuple(place for _, place in own)


class Reference:
    """The reference values of a fragment, from which its progress is measured; empty before a version.

    Not thread-safe: its calls are made one after the other, in the order of the events that cause them.

    Args:
        tensors: The tensors of the fragment, in manifest order.
    """

    def __init__(self, tensors: Sequence[TensorSpec]) -> None:
        self._tensors = tuple(tensors)
        #: float32, flat, one per tensor. As a version was installed these may be the version itself, as it is kept to
        #: add differences to: read-only, and replaced with the first change. A model less while training begins.
        self.values: list[Float32Array] = []
        #: The corruption found, or empty. After it nothing is handed over until a version has replaced everything.
        self.flaw = ""
        #: (tensor, first element) -> checksum of a block as it was written. Nothing else tells a bit that flips at
        #: rest from training: it would be handed over as progress. Blocks are looked at as they are read for work, and
        #: so lie in the cache.
        self._seals: dict[tuple[int, int], int] = {}

    def compare(self, version: Sequence[Array], dtypes: Sequence[np.dtype[Any]], local: Sequence[Array]) -> str:
        """Returns the first element that differs from the version after an overwriting adoption, in words.

        Args:
            version: The result of :meth:`shift` with ``keep = 0``.
            dtypes: The dtypes of the local parameters.
            local: A copy of them, as the adoption has left them.
        """
        for tensor, value, dtype, leaf in zip(self._tensors, version, dtypes, local, strict=True):
            with np.errstate(over="ignore", invalid="ignore"):
                wanted, found = _flat(np.asarray(value, dtype)), _flat(leaf)
            differs = wanted.view(np.uint8) != found.view(np.uint8)
            if differs.any():
                element = int(differs.argmax()) // dtype.itemsize
                what = f"{found[element]!s}, where the version has {wanted[element]!s}"
                self.flaw = f"{tensor.name} was not adopted as it came: element {element} is {what}"
                break
        return self.flaw

    def capture(self, local: Sequence[Array], codec: Codec, *, feedback: bool = True) -> tuple[Encoded, ...]:
        """Returns the encoded pseudo-gradient, and advances the reference by the encoded values.

        Nothing where :attr:`flaw` says that the reference is corrupt, as it may turn out here.

        One float32 array the size of a tensor is allocated at a time, beside the encoded ones.

        Args:
            local: A copy of the local parameters.
            codec: The codec of the pseudo-gradient.
            feedback: Whether the codec's rounding error stays in the progress, as it must in production. Without, the
                reference moves to ``local`` itself, and it is lost: only to show the difference.

        Raises:
            LocalProtocolError: If nothing was installed yet, or a shape has changed.
        """
        _check(self._tensors, local)
        self._filled()
        payload = []
        # The aggregator finds and refuses values that are not finite.
        with np.errstate(over="ignore", invalid="ignore"):
            for i, (tensor, reference, leaf) in enumerate(zip(self._tensors, self.values, local, strict=True)):
                flat = _flat(leaf)
                delta = np.empty(reference.shape, np.float32)
                for here in _blocks(flat.size):
                    self._look(i, here)
                    delta[here] = reference[here] - _widened(flat[here])
                if self.flaw:
                    return ()
                encoded = encode_tensor(delta.reshape(tensor.shape), codec)
                payload.append(encoded)
                moved = self.values[i] = _writable(reference)
                if feedback and codec is not Codec.F32:  # in float32 the payload is a view of delta
                    decode_into(encoded, delta)
                for here in _blocks(flat.size):
                    if feedback:
                        np.subtract(reference[here], delta[here], out=moved[here])
                    else:
                        moved[here] = _widened(flat[here])
                    self._seal(i, here)
        return tuple(payload)

    def shift(
        self, payload: Sequence[Encoded], keep: float, dtypes: Sequence[np.dtype[Any]], *, mixes: bool = False
    ) -> tuple[Array, ...]:
        """Returns the shift to add to ``keep * local`` to adopt a version; with ``keep = 0``, the version.

        Not to be used where :attr:`flaw` says that progress is measured from what is corrupt.

        Args:
            payload: The version's, checked against the tensors.
            keep: Share of the local progress that survives.
            dtypes: The dtypes of the local parameters.
            mixes: ``keep`` is the share of the local value itself, which the version is mixed with.

        Returns:
            Arrays in the tensors' shapes, in :func:`wide_dtype`; with ``keep = 0`` float32, possibly read-only.

        Raises:
            LocalProtocolError: If progress is to be kept and nothing was installed yet.
        """
        if keep == 0:
            return tuple(decode_tensor(encoded) for encoded in payload)
        self._filled()
        shifts = []
        with np.errstate(over="ignore", invalid="ignore"):
            for i, (encoded, reference, dtype) in enumerate(zip(payload, self.values, dtypes, strict=True)):
                target = decode_tensor(encoded)
                shifts.append(np.empty(target.shape, wide_dtype(dtype)))
                flat, shift = target.reshape(-1), shifts[-1].reshape(-1)
                for here in _blocks(flat.size):
                    if not mixes:
                        self._look(i, here)
                    from_where = (flat if mixes else reference)[here]
                    if keep != 1:
                        from_where = np.float32(keep) * from_where
                    np.subtract(flat[here], from_where, out=shift[here], dtype=shift.dtype)
        return tuple(shifts)

    def installed(
        self,
        shift: Sequence[Array],
        keep: float,
        dtypes: Sequence[np.dtype[Any]],
        before: Sequence[Array],
        *,
        mixes: bool = False,
    ) -> None:
        """Moves the reference along with an installation into the local parameters.

        Args:
            shift: From :meth:`shift`.
            keep: As given there.
            dtypes: The dtypes of the local parameters.
            before: The local parameters that were replaced, where one of them :func:`is_narrow` and progress is kept.
            mixes: As given there. The reference becomes the version itself.

        Raises:
            LocalProtocolError: If a shape has changed.
        """
        with np.errstate(over="ignore", invalid="ignore"):
            if keep == 0:
                self.flaw = ""
                self.values = [_as_local(_flat(value), dtype) for value, dtype in zip(shift, dtypes, strict=True)]
                self._seal_all()
                return
            if mixes:
                for i, move in enumerate(shift):
                    moved = self.values[i] = _writable(self.values[i])
                    np.divide(_flat(move), np.float32(1 - keep), out=moved, casting="same_kind")
                self._seal_all()
                return
            if any(map(is_narrow, dtypes)):
                _check(self._tensors, before)
            for i, (reference, move, dtype) in enumerate(zip(self.values, shift, dtypes, strict=True)):
                moves, moved = _flat(move), _writable(reference)
                self.values[i] = moved
                flat = _flat(before[i]) if is_narrow(dtype) else None
                for here in _blocks(reference.size):
                    self._look(i, here, reference)
                    if flat is None:
                        moved[here] = adopted(reference[here], moves[here], keep)
                        self._seal(i, here)
                        continue
                    local = flat[here]
                    progress = _widened(local) - reference[here]
                    after = _widened(adopted(local, moves[here], keep))
                    moved[here] = after - (progress if keep == 1 else keep * progress)
                    self._seal(i, here)

    def _look(self, i: int, here: slice, values: Float32Array | None = None) -> None:
        block = (self.values[i] if values is None else values)[here]
        if not self.flaw and xxhash.xxh3_64_intdigest(block.data) != self._seals[i, here.start]:
            where = f"elements {here.start} to {here.stop - 1}"
            self.flaw = f"the reference of {self._tensors[i].name} changed in memory, in {where}"

    def _seal(self, i: int, here: slice) -> None:
        self._seals[i, here.start] = xxhash.xxh3_64_intdigest(self.values[i][here].data)

    def _seal_all(self) -> None:
        for i, values in enumerate(self.values):
            for here in _blocks(values.size):
                self._seal(i, here)

    def _filled(self) -> None:
        if not self.values:
            raise LocalProtocolError("a fragment has no reference before its first version is installed")


def _check(tensors: Sequence[TensorSpec], leaves: Sequence[Array]) -> None:
    for tensor, leaf in zip(tensors, leaves, strict=True):
        if tuple(leaf.shape) != tensor.shape:
            cure = "parameters keep their shapes while an island is in a run"
            raise LocalProtocolError(f"{tensor.name} has the shape {leaf.shape}, it joined with {tensor.shape}: {cure}")


def _flat(array: Array) -> Array:
    return np.ascontiguousarray(array).reshape(-1)


def _writable(reference: Float32Array) -> Float32Array:
    """Returns the array itself, or an empty one in its place if it belongs to a version."""
    return reference if reference.flags.writeable else np.empty_like(reference)


def _as_local(value: Array, dtype: np.dtype[Any]) -> Float32Array:
    """Returns a version rounded to ``dtype``, as float32; its own array if nothing is rounded."""
    if dtype == np.float32 and value.dtype == np.float32 and not value.flags.writeable:
        return value
    wide = np.empty(value.shape, np.float32)
    for here in _blocks(value.size):
        wide[here] = _widened(value[here].astype(dtype))
    return wide


def _blocks(size: int) -> Iterator[slice]:
    return (slice(start, min(start + _BLOCK, size)) for start in range(0, size, _BLOCK))


def _widened(block: Array) -> Array:
    """Returns a flat block in :func:`wide_dtype`."""
    if block.dtype == ml_dtypes.bfloat16:
        # A bfloat16 is the upper half of a float32: shifting is exact, and twice as fast as converting.
        return cast(Array, np.left_shift(block.view(np.uint16), 16, dtype=np.uint32).view(np.float32))
    return block.astype(wide_dtype(block.dtype), copy=False)


# --- versions as they come ---------------------------------------------------------------------------------------


class HeldVersions:
    """The newest received version of each fragment, to which differences are added.

    The reference values of a fragment are no substitute: they are what the local parameters were measured from, rounded
    as these are. One float32 vector a fragment is kept, and none where versions travel whole. Not thread-safe.

    Args:
        manifest: The manifest of the run.
        differences: Whether versions are expected to come as differences; where they do unexpectedly, the first one of
            a fragment is refused, and its base kept from then on.
    """

    def __init__(self, manifest: FragmentManifest, *, differences: bool) -> None:
        self._manifest = manifest
        self._differences = differences
        self._held: dict[int, tuple[int, Float32Array]] = {}  # by fragment, with the version

    def take(self, envelope: Envelope) -> tuple[Envelope, str]:
        """Returns the whole version and its flaw in words, empty if there is none.

        Checksums, the number of tensors, their shapes and codecs, that the base of a difference is here, and the digest
        that names the bytes of what comes of it.
        """
        version = envelope.message
        assert isinstance(version, Version)
        p = version.fragment_id
        if p >= len(self._manifest):
            return envelope, f"{Reason.UNKNOWN_FRAGMENT}: fragment {p} of {len(self._manifest)}"
        try:
            verify(envelope)
            codecs = _FLOAT32 if version.base is None else frozenset(Codec)
            check_payload(version.payload, self._manifest.fragments[p], codecs=codecs)
        except RemoteProtocolError as err:
            return envelope, str(err)
        if version.base is None:
            parts = [decode_tensor(encoded).reshape(-1) for encoded in version.payload]
            if not self._differences:
                return envelope, _misnamed(version, fragment_digest(*parts))
            vector = np.concatenate(parts)
        else:
            self._differences = True
            held, base = self._held.get(p, (None, None))
            if base is None or held != version.base:
                have = "none" if held is None else f"version {held}"
                return envelope, f"it is the difference to version {version.base}, and {have} is here"
            vector = added(base, version.payload)
        flaw = _misnamed(version, fragment_digest(vector))
        if flaw:
            self._held.pop(p, None)
        else:
            self._held[p] = version.fragment_version, vector
        payload = encode_vector(vector, [tensor.shape for tensor in self._manifest.fragments[p]], Codec.F32)
        return replace(envelope, message=replace(version, base=None, payload=payload)), flaw


def misnamed(digest: str, payload: Sequence[Encoded]) -> str:
    """Returns the flaw of a kept version whose bytes no longer fit its digest; empty if they fit."""
    found = fragment_digest(*map(decode_tensor, payload))
    return "" if found == digest else f"a version that was kept changed in memory: digest is {found}, was {digest}"


def _misnamed(version: Version, digest: str) -> str:
    return "" if digest == version.digest else f"digest is {digest}, the version is named {version.digest}"
