"""A merge's kernel, compiled by numba: decode, compare, fold, outer step, by blocks in the cache.

Importing this module compiles them or loads them from numba's cache, so it is imported where they are first needed, in
a worker thread. A kernel works on one piece, a range of a tensor without gaps: whole rows of ``columns`` elements, or
a part of one row. It holds no lock of the interpreter, so pieces are computed side by side (:mod:`.passes`).

*Same bytes.* The sum of an element is ``((w0 * x0 + w1 * x1) + w2 * x2) + ..``, each product and each sum rounded to
float32 by itself. Nothing here may be compiled with ``fastmath``: it would fuse and reorder them. Blocks begin with
rows and pieces, so no result depends on the number of threads or on where a row lies. Only the sums of squares of a
block are added in the order that suits the vectors of the processor (a fixed one was three times slower): lengths, and
an RDA by way of them, are the same on one kind of processor; a mean and what islands compute again on any.

*Addresses.* Arrays come as their addresses: any number of contributions in any codec, read-only or not, at any
alignment, is then one compilation of each kernel. Callers keep the arrays alive, scratch too: numba frees an array
after its last mention, which is where its address was taken.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic, register_jitable

from aggregator.merge.compiling import compile_kernel
from aggregator.merge.layout import BF16, DELTA, F32, INT8, MOMENTUM, NEW_MOMENTUM, NEW_PARAMS, PARAMS, RESIDUAL
from broker.wire.number_formats import BLOCK_ELEMENTS

#: Elements: 16 KiB of float32: what is decoded and folded stays in the second-level cache. 2^10 and 2^11 were slower.
BLOCK: Final = 1 << 12
SCRATCH: Final = 8 * BLOCK
_MAGNITUDE: Final = 0x7FFFFFFF


@intrinsic
def _pointer(typing_context: Any, address: Any) -> Any:
    """Returns an address as a pointer to anything."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), generate


@register_jitable
def _floats(address: Any, count: Any) -> Any:
    return carray(_pointer(address), count, np.float32)


@register_jitable
def _bytes(address: Any, count: Any) -> Any:
    return carray(_pointer(address), count, np.uint8)


@register_jitable
def _decoded(source: Any, at: Any, count: Any, scratch: Any) -> Any:
    """Returns the address of a contribution's elements as float32: its own bytes, or filled ``scratch``."""
    address, codec, elements = source[0], source[1], source[2]
    start = at - source[3]
    if codec == F32:
        if address % 4 == 0:
            return address + 4 * start
        _copied(address + 4 * start, 4 * count, scratch)
    elif codec == BF16:
        _shifted(address + 2 * start, count, scratch)
    else:
        blocks = (elements + BLOCK_ELEMENTS - 1) // BLOCK_ELEMENTS
        _multiplied(address, address + 4 * blocks, codec, start, count, scratch)
    return scratch


@register_jitable
def _decoded_four(sources: Any, i: Any, first: Any, n: Any, scratch: Any, at: Any) -> Any:
    """Writes the addresses of four contributions from number ``i`` on; beyond the last, the first again."""
    some = min(4, sources.shape[0] - i)
    for j in range(4):
        at[j] = _decoded(sources[i + j], first, n, scratch + 4 * j * BLOCK) if j < some else at[0]
    return some


@register_jitable
def _copied(address: Any, count: Any, to: Any) -> None:
    source, out = _bytes(address, count), _bytes(to, count)
    for i in range(count):
        out[i] = source[i]


@register_jitable
def _shifted(address: Any, count: Any, scratch: Any) -> None:
    """Widens bf16 to float32, of which it is the upper half."""
    words = carray(_pointer(scratch), count, np.uint32)
    if address % 2:  # moved to where it can be read; the words are written from the front, behind what is read
        _copied(address, 2 * count, scratch + 2 * count)
        address = scratch + 2 * count
    halves = carray(_pointer(address), count, np.uint16)
    for i in range(count):
        words[i] = np.uint32(halves[i]) << np.uint32(16)


@register_jitable
def _multiplied(first_scale: Any, first_code: Any, codec: Any, start: Any, count: Any, scratch: Any) -> None:
    """Decodes block-wise integers: each element is its code times the scale of its block, in float32."""
    out = _floats(scratch, count)
    if codec == INT8:
        codes = carray(_pointer(first_code + start), count, np.int8)
        for i in range(count):
            out[i] = np.float32(np.int32(codes[i]))
    else:
        odd = start % 2  # the second code of its byte
        if odd:
            out[0] = _signed(np.int32(_bytes(first_code + start // 2, 1)[0] >> 4))
        pairs = (count - odd) // 2
        octets, after = _bytes(first_code + start // 2 + odd, (count - odd + 1) // 2), _floats(scratch + 4 * odd, count)
        for i in range(pairs):
            octet = np.int32(octets[i])
            after[2 * i] = _signed(np.int32(octet & np.int32(15)))
            after[2 * i + 1] = _signed(np.int32(octet >> np.int32(4)))
        if odd + 2 * pairs < count:
            out[count - 1] = _signed(np.int32(octets[pairs] & 15))
    here = 0
    while here < count:
        block = (start + here) // BLOCK_ELEMENTS
        some = min((block + 1) * BLOCK_ELEMENTS - start, count) - here
        scale, part = _unaligned(first_scale + 4 * block), _floats(scratch + 4 * here, some)
        for i in range(some):
            part[i] *= scale
        here += some


@register_jitable
def _signed(code: Any) -> Any:
    """Returns the number that is written in four bits, 0 to 7 and -8 to -1."""
    return np.float32(np.int32(np.int32(code ^ np.int32(8)) - np.int32(8)))


@intrinsic
def _unaligned(typing_context: Any, address: Any) -> Any:
    """Reads a float32 at any address."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        number = context.get_value_type(types.float32)
        return builder.load(builder.inttoptr(args[0], number.as_pointer()), align=1)

    return types.float32(types.int64), generate


@intrinsic
def _accumulated(typing_context: Any, total: Any, term: Any) -> Any:
    """Adds float32 in any order that suits the processor; for lengths alone, which no island recomputes."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fadd(args[0], args[1], flags=("reassoc",))

    return types.float32(types.float32, types.float32), generate


@register_jitable
def _four_squares(at: Any, n: Any, found: Any) -> None:
    """Writes the sums of squares of four blocks."""
    a, b, c, d = _floats(at[0], n), _floats(at[1], n), _floats(at[2], n), _floats(at[3], n)
    p, q, r, s = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
    for i in range(n):
        p = _accumulated(p, a[i] * a[i])
        q = _accumulated(q, b[i] * b[i])
        r = _accumulated(r, c[i] * c[i])
        s = _accumulated(s, d[i] * d[i])
    found[0], found[1], found[2], found[3] = p, q, r, s


@register_jitable
def _squares(address: Any, n: Any, found: Any) -> Any:
    """Returns ``found``, or sums in float64 if it left float32's range; finite unless an element is not."""
    if 1e-30 < found < np.inf:
        return np.float64(found)
    values, total = _floats(address, n), 0.0
    for i in range(n):
        total += np.float64(values[i]) * np.float64(values[i])
    return total


@register_jitable
def _lengths_of_two(n: Any, a: Any, b: Any, c: Any, d: Any, v: Any, w: Any, found: Any) -> None:
    """Writes the squared lengths of two sums of four blocks, without storing the sums."""
    p, q = np.float32(0), np.float32(0)
    v0, v1, v2, v3, w0, w1, w2, w3 = v[0], v[1], v[2], v[3], w[0], w[1], w[2], w[3]
    for j in range(n):
        x = v0 * a[j] + v1 * b[j] + v2 * c[j] + v3 * d[j]
        y = w0 * a[j] + w1 * b[j] + w2 * c[j] + w3 * d[j]
        p = _accumulated(p, x * x)
        q = _accumulated(q, y * y)
    found[0], found[1] = p, q


@register_jitable
def _products(n: Any, a: Any, b: Any, c: Any, d: Any, out: Any, w: Any, found: Any) -> None:
    """Writes the scalar products ab, ac, ad, bc, bd, cd; and their sum by ``w``, unless ``out`` is empty."""
    p, q, r, s, t, u = np.float32(0), np.float32(0), np.float32(0), np.float32(0), np.float32(0), np.float32(0)
    w0, w1, w2, w3 = w[0], w[1], w[2], w[3]
    for j in range(n):
        if out.size:
            out[j] = w0 * a[j] + w1 * b[j] + w2 * c[j] + w3 * d[j]
        p = _accumulated(p, a[j] * b[j])
        q = _accumulated(q, a[j] * c[j])
        r = _accumulated(r, a[j] * d[j])
        s = _accumulated(s, b[j] * c[j])
        t = _accumulated(t, b[j] * d[j])
        u = _accumulated(u, c[j] * d[j])
    found[0], found[1], found[2], found[3], found[4], found[5] = p, q, r, s, t, u


@register_jitable
def _products_of_one(n: Any, x: Any, a: Any, b: Any, c: Any, d: Any, found: Any) -> None:
    """Writes the scalar products of one block with four others."""
    p, q, r, s = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
    for j in range(n):
        p = _accumulated(p, x[j] * a[j])
        q = _accumulated(q, x[j] * b[j])
        r = _accumulated(r, x[j] * c[j])
        s = _accumulated(s, x[j] * d[j])
    found[0], found[1], found[2], found[3] = p, q, r, s


@register_jitable
def _compared(sources: Any, first: Any, n: Any, products: Any, row: Any, chunk: Any, room: Any) -> None:
    """Adds the scalar products of a block of five or more contributions, all decoded into ``room``."""
    k, pair = sources.shape[0], 0
    at, found = np.zeros(k, np.int64), np.zeros(4, np.float32)
    for i in range(k):
        at[i] = _decoded(sources[i], first, n, room + 4 * i * BLOCK)
    for i in range(k - 1):
        x = _floats(at[i], n)
        for j in range(i + 1, k, 4):
            last = k - 1
            a, b = _floats(at[j], n), _floats(at[min(j + 1, last)], n)
            c, d = _floats(at[min(j + 2, last)], n), _floats(at[min(j + 3, last)], n)
            _products_of_one(n, x, a, b, c, d, found)
            for some in range(min(4, k - j)):
                products[pair, row, chunk] += np.float64(found[some])
                pair += 1


@register_jitable
def _added(out: Any, fresh: Any, count: Any, a: Any, b: Any, c: Any, d: Any, w: Any, column: Any, i: Any) -> None:
    """Adds up to four contributions, from number ``i`` on, to a block: one pass over it for four of them."""
    n, last = out.size, i + count - 1
    w0, w1, w2, w3 = w[i, column], w[min(i + 1, last), column], w[min(i + 2, last), column], w[last, column]
    if count == 4 and fresh:
        for j in range(n):
            out[j] = w0 * a[j] + w1 * b[j] + w2 * c[j] + w3 * d[j]
        return
    if fresh:
        for j in range(n):
            out[j] = np.float32(-0.0)  # to which anything can be added without a change
    if count == 4:
        for j in range(n):
            out[j] = out[j] + w0 * a[j] + w1 * b[j] + w2 * c[j] + w3 * d[j]
    elif count == 3:
        for j in range(n):
            out[j] = out[j] + w0 * a[j] + w1 * b[j] + w2 * c[j]
    elif count == 2:
        for j in range(n):
            out[j] = out[j] + w0 * a[j] + w1 * b[j]
    else:
        for j in range(n):
            out[j] = out[j] + w0 * a[j]


@register_jitable
def _stepped(merged: Any, places: Any, start: Any, eta: Any, mu: Any, exact: Any, found: Any) -> Any:
    """Takes the outer step of a block; returns its new parameters' largest magnitude, as a float's bits.

    Writes the scalar product of what was merged and the momentum before, and the latter's square.
    """
    n = merged.size
    before = _floats(places[PARAMS] + 4 * start, n)
    if places[RESIDUAL]:
        residual = _floats(places[RESIDUAL] + 4 * start, n)
        for i in range(n):
            exact[i] = before[i] + residual[i]
        before = exact
    momentum = _floats(places[MOMENTUM] + 4 * start, n)
    params, trace = _floats(places[NEW_PARAMS] + 4 * start, n), _floats(places[NEW_MOMENTUM] + 4 * start, n)
    p, q = np.float32(0), np.float32(0)
    for i in range(n):
        p = _accumulated(p, merged[i] * momentum[i])
        q = _accumulated(q, momentum[i] * momentum[i])
        m = merged[i] + mu * momentum[i]
        trace[i] = m
        params[i] = before[i] - eta * (merged[i] + mu * m)
    found[0], found[1] = p, q
    return _largest(places[NEW_PARAMS] + 4 * start, n)


def _folded(
    sources: Any,
    first: Any,
    rows: Any,
    columns: Any,
    factors: Any,
    weights: Any,
    counted: Any,
    places: Any,
    rate: Any,
    sums: Any,
    products: Any,
    chunk: Any,
    scratch: Any,
) -> Any:
    """Makes one pass over a piece: every pass of a merge is this one, to have one kernel to compile.

    Args:
        sources: int64 [k, 4] (:mod:`.layout`); none of them leaves zeros.
        first: Element of the tensor with which the piece begins.
        rows: In the piece.
        columns: Elements of each row in the piece.
        factors: float32 [k, rows], by which contributions are folded; [0, 0]: nothing is, this is about lengths.
        weights: float32 [k, 1]: where a second fold is made beside the first, both for their lengths alone; or [0, 0].
        counted: Which squares are added: 0 none, 1 those of folds, 2 those of contributions, too.
        places: int64 [6] (:mod:`.layout`), where the piece begins in the vectors of the fragment; 0: not there.
        rate: float32 [2]: learning rate and momentum.
        sums: float64 [k + 4, rows, chunks]: squares of each contribution, of what was folded, and beside it; the
            product of what was folded and the momentum before the outer step, and the latter's square.
        products: float64 [k * (k - 1) / 2, rows, chunks]: scalar products of any two contributions; or [0, 0, 0].
        chunk: Number of the chunk of the row.
        scratch: Address of float32 [SCRATCH], and with ``products`` of k blocks more.

    Returns:
        The largest magnitude of a new parameter, as the bits of a float32.
    """
    k, folds, largest = sources.shape[0], 1 + (weights.shape[0] > 0), np.int64(0)
    if factors.shape[0] < k:
        folds = 0
    at, found, six = np.zeros(4, np.int64), np.zeros(4, np.float32), np.zeros(6, np.float32)
    v, w = np.zeros(4, np.float32), np.zeros(4, np.float32)
    for row in range(rows):
        for start in range(0, columns, BLOCK):
            n, here = min(BLOCK, columns - start), row * columns + start
            exact = _floats(scratch + 28 * BLOCK, n)
            done = False
            if k > 4 and products.shape[0]:
                _compared(sources, first + here, n, products, row, chunk, scratch + 4 * SCRATCH)
            for i in range(0, k, 4):
                some = _decoded_four(sources, i, first + here, n, scratch, at)
                a, b, c, d = _floats(at[0], n), _floats(at[1], n), _floats(at[2], n), _floats(at[3], n)
                summed = 0
                if k <= 4 and products.shape[0]:
                    if k == 4 and folds == 1:  # what is read once is compared and added
                        summed = 1
                        for j in range(4):
                            v[j] = factors[j, row]
                    _products(n, a, b, c, d, _floats(scratch + 16 * BLOCK, n * summed), v, six)
                    for j in range(products.shape[0]):
                        products[j, row, chunk] += np.float64(six[j if k == 4 else j + j // 2])
                if folds == 2 and k <= 4:
                    for j in range(k):
                        v[j], w[j] = factors[j, row], weights[j, 0]
                    _lengths_of_two(n, a, b, c, d, v, w, found)
                    if min(found[0], found[1]) > 1e-30 and max(found[0], found[1]) < np.inf:
                        sums[k, row, chunk] += np.float64(found[0])
                        sums[k + 1, row, chunk] += np.float64(found[1])
                        done = True
                        continue
                for f in range(summed, folds):
                    out = _floats(scratch + 4 * (4 + f) * BLOCK, n)
                    table, column = (factors, row) if f == 0 else (weights, 0)
                    _added(out, i == 0, some, a, b, c, d, table, column, i)
                if counted > 1:
                    _four_squares(at, n, found)
                    for j in range(some):
                        sums[i + j, row, chunk] += _squares(at[j], n, found[j])
            if done:
                continue
            out = _floats(scratch + 16 * BLOCK, n)
            if k == 0:
                for j in range(n):
                    out[j] = 0
            if folds and counted:
                at[0] = at[2] = scratch + 16 * BLOCK
                at[1] = at[3] = scratch + 4 * (3 + folds) * BLOCK
                _four_squares(at, n, found)
            for f in range(folds if counted else 0):
                sums[k + f, row, chunk] += _squares(at[f], n, found[f])
            if folds and places[DELTA]:
                delta = _floats(places[DELTA] + 4 * here, n)
                for j in range(n):
                    delta[j] = out[j]
            if folds and places[NEW_MOMENTUM]:
                largest = max(largest, _stepped(out, places, here, rate[0], rate[1], exact, found))
                for f in range(2):
                    sums[k + 2 + f, row, chunk] += np.float64(found[f])
    return largest


@register_jitable
def _largest(address: Any, n: Any) -> Any:
    """Returns the bits of the largest magnitude of float32 numbers; NaN and infinity rank above all."""
    bits, largest = carray(_pointer(address), n, np.int32), np.int32(0)
    for i in range(n):
        largest = max(largest, np.int32(bits[i] & np.int32(_MAGNITUDE)))
    return np.int64(largest)


_FLOATS = "float32[:,::1]"
folded = compile_kernel(
    _folded,
    f"int64(int64[:,::1], int64, int64, int64, {_FLOATS}, {_FLOATS}, int64, int64[::1], float32[::1],"
    " float64[:,:,:], float64[:,:,:], int64, int64)",
)
