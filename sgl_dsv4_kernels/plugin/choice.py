"""Which decode calls our kernel takes.

The choice is by rows and heads of a step alone, never by layer: the three scheduler-metadata launches of FlashMLA
(25 us each, once a step) go away only if no layer of the step calls it.

Measured on an H200 with the Triton backend (benchmark/results/h200/sparse_decode.csv), us a call, 128 + 512 keys,
ours / FlashMLA's split and combine kernels (which see 8 and 16 heads padded to 64):

    rows             1            8           16           32           64          128
     8 heads    9.7/12.4    10.6/14.3    15.8/16.8    21.7/22.6    33.9/44.2    65.3/45.4
    16 heads   10.1/12.3    11.1/14.4    16.5/16.9    22.4/22.6    35.5/44.5    67.4/45.5
    64 heads   14.5/12.3    17.2/14.5    23.8/17.1    33.7/22.9    55.2/44.6    87.5/45.7

Beside that, a call of ours saves the inverse RoPE kernel (1.4 to 1.9 us), and a step of ours the 77 to 87 us of
metadata. At 64 heads that pays for 2.7 us lost in a layer at 8 rows up to about 60 layers, and for 5 to 9 us at 16 to
64 rows up to about 10: enough for the 6-layer model of the benchmark. 32 heads lie between 16 and 64 and are not
measured, nor are 128.
"""

from __future__ import annotations

MOST_ROWS = {8: 64, 16: 64, 32: 64, 64: 64, 128: 0}
"""Heads of this rank -> most rows that our kernel takes."""


def takes_decode(heads: int, rows: int, *, most_rows: int | None = None, batch_invariant: bool = False) -> bool:
    """Whether our kernel decodes ``rows`` query tokens of ``heads`` heads.

    Args:
        most_rows: this instead of the table. batch_invariant: take all, because a row's bits must not depend on how
            many others there are, and two kernels do not round alike.
    """
    if most_rows is not None:
        return rows <= most_rows
    return batch_invariant or rows <= MOST_ROWS.get(heads, 0)
