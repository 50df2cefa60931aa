"""Which decode calls our kernel takes.

The choice is by rows and heads of a step alone, never by layer: the three scheduler-metadata launches of FlashMLA
(26 to 32 us each, once a step) go away only if no layer of the step calls it. Beside that, a call of ours saves the
query's norm and RoPE (2.2 to 3.4 us) and the inverse RoPE (1.3 to 2.1 us). All of it comes on top of what follows,
FlashMLA's time over ours on an H200, 128 + 512 keys, 8 to 32 heads padded to 64 for FlashMLA:

    rows                      1     4     8    16    32    64    96   128   256
    sm90      8 heads      2.6   2.7   2.7   2.6   2.5   4.1   2.7   2.7   2.8
              16           2.6   2.6   2.3   2.0   2.2   3.7   2.4   2.4   2.6
              32           2.6   2.1   1.7   1.7   1.9   3.0   2.0   2.0   2.1
              64           2.4   1.6   1.4   1.5   1.6   2.1   1.5   1.6   1.6
              128          1.9   1.4   1.4   1.4   1.6   1.1   1.2   1.2   1.3
    triton    8            1.7   1.8   1.9   1.4   1.4   1.8
              16           1.7   1.7   1.7   1.3   1.4   1.7
              64           1.5   1.1   0.9   0.8   0.8   0.9

benchmark/results/h200/sparse_decode.csv, whose least is 1.14 (128 heads, 64 rows, 512 extra keys; warm), and
sparse_decode_triton.csv.
"""

from __future__ import annotations

MOST_ROWS = {8: 512, 16: 512, 32: 512, 64: 512, 128: 512}
"""Heads of this rank -> most rows that the Hopper kernel takes. Both kernels take time in proportion to the rows from
128 on, so somewhat more rows than the 384 measured are taken too."""

MOST_ROWS_TRITON = {8: 64, 16: 64, 32: 8, 64: 8, 128: 0}
"""The same for the Triton kernel. 32 and 128 heads are not measured."""


def takes_decode(
    heads: int, rows: int, *, backend: str = "sm90", most_rows: int | None = None, batch_invariant: bool = False
) -> bool:
    """Whether our kernel decodes ``rows`` query tokens of ``heads`` heads.

    Args:
        backend: of the decode. most_rows: this instead of the table. batch_invariant: take all, whatever most_rows
            says, because a row's bits must not depend on how many others there are, and two kernels do not round alike.
    """
    if batch_invariant:
        return True
    if most_rows is not None:
        return rows <= most_rows
    table = MOST_ROWS_TRITON if backend == "triton" else MOST_ROWS
    return rows <= table.get(heads, 0)
