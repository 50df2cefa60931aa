"""Plain-torch twins of the kernels: what the CPU dispatch key runs, and what tests compare with."""

from sgl_dsv4_kernels.reference import decode
from sgl_dsv4_kernels.reference.query import query_norm_rope
from sgl_dsv4_kernels.reference.store import dequantize_rows, norm_rope, resolve_plan

__all__ = ["decode", "dequantize_rows", "norm_rope", "query_norm_rope", "resolve_plan"]
